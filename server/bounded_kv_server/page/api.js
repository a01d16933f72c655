// Requests to the server that the page came from, with the key if there is one.

const KEY = "bounded-kv-key";

// What the server refuses, or that it does not answer.
export class Failure extends Error {
  constructor(message, { status = 0, field = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, field, retryAfter });
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

// A response with a good status; throws a Failure, or an AbortError where `signal` says so.
export async function call(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const all = key === null ? headers : { ...headers, Authorization: `Bearer ${key}` };
  let response;
  try {
    response = await fetch(path, { ...options, headers: all, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer.");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

// Of a body in OpenAI's envelope, or of whatever a proxy says.
async function failureOf(response) {
  const body = await response.json().catch(() => null);
  const error = body?.error;
  const message = error?.message ?? (typeof error === "string" ? error : response.statusText);
  return new Failure(message || `status ${response.status}`, {
    status: response.status,
    field: error?.param ?? null,
    retryAfter: response.headers.get("Retry-After"),
  });
}
