// Plays samples as they come, each part where the last one ends.
//
// Parts are scheduled on the context's own clock, at whole samples. (An AudioWorklet would do as
// well, but browsers have none on pages that came over plain HTTP from another machine.)

const START_BUFFER_S = 0.1; // as the server's metrics take a listener to have
const USUAL_RATE = 24000;

let context = null;

// To be called while a key or a button is pressed: browsers let no page sound before.
export function wake() {
  contextAt(context?.sampleRate ?? USUAL_RATE).resume();
}

// At the sound's own rate: nothing is resampled part by part.
function contextAt(rate) {
  if (context?.sampleRate !== rate) context = new AudioContext({ sampleRate: rate });
  return context;
}

export class Player {
  underruns = 0;
  silenceS = 0; // of all underruns
  #context;
  #gain;
  #parts = new Set();
  #endsAt = null;

  constructor(rate) {
    this.#context = contextAt(rate);
    this.#gain = this.#context.createGain();
    this.#gain.connect(this.#context.destination);
  }

  // Seconds of sound that are not yet heard.
  get aheadS() {
    return this.#endsAt === null ? 0 : Math.max(0, this.#endsAt - this.#context.currentTime);
  }

  mute(isMuted) {
    this.#gain.gain.value = isMuted ? 0 : 1;
  }

  feed(samples) {
    const buffer = this.#context.createBuffer(1, samples.length, this.#context.sampleRate);
    buffer.copyToChannel(samples, 0);
    const part = this.#context.createBufferSource();
    part.buffer = buffer;
    part.connect(this.#gain);
    part.onended = () => this.#parts.delete(part);
    this.#parts.add(part);
    const start = this.#nextStart();
    part.start(start);
    this.#endsAt = start + buffer.duration;
  }

  stop() {
    for (const part of this.#parts) part.stop();
    this.#gain.disconnect();
    this.#endsAt = null;
  }

  #nextStart() {
    const now = this.#context.currentTime;
    if (this.#endsAt !== null && this.#endsAt >= now) return this.#endsAt;
    const rate = this.#context.sampleRate;
    const start = Math.ceil((now + START_BUFFER_S) * rate) / rate;
    if (this.#endsAt !== null) {
      this.underruns += 1;
      this.silenceS += start - this.#endsAt;
    }
    return start;
  }
}
