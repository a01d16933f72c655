// Asks the server where its streams stand (GET /v1/bounded_kv), for as long as somebody wants to know.

import { call } from "./api.js";

const EVERY_MS = 200;
const LATER_MS = 2000;

export class Figures {
  #isWanted;
  #onFigures;
  #runs = false;

  constructor(isWanted, onFigures) {
    this.#isWanted = isWanted;
    this.#onFigures = onFigures;
  }

  async start() {
    if (this.#runs) return;
    this.#runs = true;
    while (this.#isWanted()) await pause(await this.#once());
    this.#runs = false;
  }

  // Milliseconds until it is to be asked again: less often where it does not answer.
  async #once() {
    try {
      const response = await call("v1/bounded_kv");
      this.#onFigures(await response.json());
      return EVERY_MS;
    } catch {
      return LATER_MS;
    }
  }
}

// The one stream of a response among all; none when it does not run.
export function find(figures, id) {
  return id === null ? undefined : figures.streams.find((each) => each.request_id.startsWith(id));
}

// Blocks that the keys and values of all entries so far take.
export function stockBlocks(figures, stream) {
  return Math.ceil(stream.position / figures.block_size);
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
