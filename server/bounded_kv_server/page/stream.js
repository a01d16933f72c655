// One stream: asks for speech, plays it while it comes, and measures.

import { call, Failure } from "./api.js";
import { Player } from "./player.js";

// waiting: nothing has come; speaking: sound comes; sounding: all has come, and is not yet heard.
const COMING = ["waiting", "speaking"];
const OPEN = [...COMING, "sounding"];
const TICK_MS = 100;

export class Stream {
  state = "waiting";
  id = null; // its name in /v1/bounded_kv
  failure = null;
  firstS = null; // from the request to the first sound
  madeS = 0; // sound that has come
  tookS = 0; // from the request to the last of it
  #onChange;
  #player = null;
  #abort = new AbortController();
  #begun = performance.now();
  #ticks;

  // `onChange` is called whenever there may be something new to show.
  constructor(text, voice, onChange) {
    this.#onChange = onChange;
    this.#ticks = setInterval(() => this.#tick(), TICK_MS);
    this.#run({ input: text, voice: voice || undefined, response_format: "pcm" });
  }

  get isOpen() {
    return OPEN.includes(this.state);
  }

  get isComing() {
    return COMING.includes(this.state);
  }

  get ageS() {
    return (performance.now() - this.#begun) / 1000;
  }

  get aheadS() {
    return this.#player?.aheadS ?? 0;
  }

  get underruns() {
    return this.#player?.underruns ?? 0;
  }

  get silenceS() {
    return this.#player?.silenceS ?? 0;
  }

  mute(isMuted) {
    this.isMuted = isMuted;
    this.#player?.mute(isMuted);
  }

  // Leaving is all that the server needs to know: it frees the stream.
  stop() {
    if (!this.isOpen) return;
    this.#end("stopped");
  }

  async #run(body) {
    try {
      const response = await call("v1/audio/speech", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
        signal: this.#abort.signal,
      });
      this.id = response.headers.get("X-Stream-Id");
      await this.#play(response);
      if (this.state === "speaking") this.#set("sounding");
    } catch (error) {
      if (!this.isOpen) return; // it was stopped
      this.failure = error instanceof Failure ? error : this.#broken(error);
      this.#end("failed");
    }
  }

  #broken(error) {
    if (error.name !== "TypeError" || this.firstS === null) return new Failure(`${error.message}`, { status: 500 });
    return new Failure(`The sound broke off after ${this.madeS.toFixed(1)} s.`);
  }

  async #play(response) {
    const rate = rateOf(response.headers.get("Content-Type"));
    const samples = new Samples();
    const reader = response.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done || !this.isOpen) return;
      const part = samples.add(value);
      if (!part.length) continue;
      this.tookS = this.ageS;
      if (this.firstS === null) {
        this.firstS = this.tookS;
        this.#player = new Player(rate);
        this.mute(this.isMuted);
        this.#set("speaking");
      }
      this.#player.feed(part);
      this.madeS += part.length / rate;
    }
  }

  #tick() {
    if (this.state === "sounding" && this.aheadS === 0) this.#end("done");
    else this.#onChange(this);
  }

  #end(state) {
    clearInterval(this.#ticks);
    if (state !== "done") {
      this.#abort.abort();
      this.#player?.stop();
    }
    this.#set(state);
  }

  #set(state) {
    this.state = state;
    this.#onChange(this);
  }
}

function rateOf(contentType) {
  const rate = Number(/rate=(\d+)/.exec(contentType ?? "")?.[1]);
  if (!rate) throw new Failure(`The server sends ${contentType}, not samples.`, { status: 500 });
  return rate;
}

// Bytes to samples; a sample may come in two parts.
class Samples {
  #odd = new Uint8Array(0);

  add(bytes) {
    const all = new Uint8Array(this.#odd.length + bytes.length);
    all.set(this.#odd);
    all.set(bytes, this.#odd.length);
    const whole = all.length - (all.length % 2);
    this.#odd = all.slice(whole);
    const view = new DataView(all.buffer);
    return Float32Array.from({ length: whole / 2 }, (_, i) => view.getInt16(2 * i, true) / 32768);
  }
}
