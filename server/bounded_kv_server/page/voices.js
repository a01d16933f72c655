// The choice of a voice, one of one's own, and to forget it.

import { call, Failure } from "./api.js";

export const MAX_BYTES = 10 * 1024 * 1024; // as the server takes at most

export class Voices {
  #select;
  #forget;
  #own = new Set();

  constructor(select, forget) {
    this.#select = select;
    this.#forget = forget;
    select.onchange = () => this.#showForget();
  }

  get chosen() {
    return this.#select.value;
  }

  // Ask for them; choose `name`, or what was chosen.
  async load(name = this.chosen) {
    const { data } = await (await call("v1/audio/voices")).json();
    this.#own = new Set(data.filter((each) => !each.built_in).map((each) => each.name));
    this.#select.replaceChildren(...data.map((each) => new Option(each.name + (each.built_in ? "" : " (yours)"), each.name)));
    if (data.some((each) => each.name === name)) this.#select.value = name;
    this.#showForget();
    return data.length;
  }

  async add(form) {
    const sample = form.get("audio_sample");
    if (sample.size > MAX_BYTES) {
      throw new Failure(`${sample.name} has ${sample.size} bytes`, { status: 413, field: "audio_sample" });
    }
    const voice = await (await call("v1/audio/voices", { method: "POST", body: form })).json();
    await this.load(voice.name);
    return voice.name;
  }

  async forget() {
    const name = this.chosen;
    await call(`v1/audio/voices/${encodeURIComponent(name)}`, { method: "DELETE" });
    await this.load();
    return name;
  }

  #showForget() {
    this.#forget.hidden = !this.#own.has(this.chosen);
  }
}
