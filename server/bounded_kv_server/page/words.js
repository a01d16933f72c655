// What went wrong, and what to do about it, in words; and numbers as they are shown.

const OF_FIELDS = {
  input: "Change the text.",
  voice: "Choose another voice.",
  name: "Choose another name.",
  consent: "Tick the box, once its speaker has agreed.",
  audio_sample: "Choose another recording: 1 to 30 s of speech as WAV, MP3, FLAC, Ogg, MP4 or WebM, at most 10 MiB.",
};

export function wordsOf(failure) {
  return `${sentence(failure.message)} ${remedyOf(failure)}`;
}

function remedyOf({ status, field, retryAfter }) {
  if (status === 0) return "See that it runs (bounded-kv-server) and can be reached, then try again.";
  if (status === 401) return "It wants a key: type it under “API key”, and try again.";
  if (status === 503) return `Try again ${retryAfter ? `in ${retryAfter} s` : "soon"}.`;
  if (field in OF_FIELDS) return OF_FIELDS[field];
  if (status === 404) return "Is this a server of bounded-kv-server, with a model that speaks?";
  if (status >= 500) return "Try again; the server's log may say more.";
  return "";
}

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

export const count = (number) => number.toLocaleString("en-GB");
export const seconds = (value, digits = 1) => `${value.toFixed(digits)} s`;
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
