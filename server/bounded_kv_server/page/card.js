// What is shown of one stream.

import { find, stockBlocks } from "./figures.js";
import { draw } from "./plot.js";
import { Stream } from "./stream.js";
import { count, seconds, wordsOf } from "./words.js";

const SHOWN = {
  waiting: "waits for its first sound",
  speaking: "speaks",
  sounding: "is made, and still sounds",
  done: "has been heard",
  stopped: "stopped",
  failed: "failed",
};
const MOST_READINGS = 600;

export class Card {
  #shown = null; // the state that was told last
  #readings = [];
  #blockSize = 1;

  // `onState(card)`: its stream has another state; `onRemove(card)`: it is to go.
  constructor(number, text, voice, { onState, onRemove }) {
    this.number = number;
    this.node = document.getElementById("card").content.cloneNode(true).firstElementChild;
    const title = this.#part("h3");
    title.textContent = `${number} · ${voice || "first voice"}`;
    title.id = `stream-${number}`;
    this.node.setAttribute("aria-labelledby", title.id);
    this.#part(".said").textContent = text;
    this.#part("[data-do=stop]").onclick = () => this.stream.stop();
    this.#part("[data-do=remove]").onclick = () => onRemove(this);
    this.#part("[data-do=mute]").onclick = ({ currentTarget }) => {
      const isMuted = currentTarget.getAttribute("aria-pressed") !== "true";
      currentTarget.setAttribute("aria-pressed", isMuted);
      this.stream.mute(isMuted);
    };
    this.resizes = new ResizeObserver(() => this.#draw());
    this.resizes.observe(this.#part(".plot"));
    this.stream = new Stream(text, voice, (stream) => {
      this.#show(stream);
      if (stream.state !== this.#shown) {
        this.#shown = stream.state;
        onState(this);
      }
    });
    this.#show(this.stream);
  }

  get words() {
    return `Stream ${this.number} ${SHOWN[this.stream.state]}`;
  }

  // Where the server says that the stream stands.
  take(figures) {
    const found = find(figures, this.stream.id);
    if (!found) return;
    const stock = stockBlocks(figures, found);
    this.#blockSize = figures.block_size;
    this.#readings.push({ at: this.stream.ageS, held: found.blocks, stock, position: found.position });
    if (this.#readings.length > MOST_READINGS) this.#readings = this.#readings.filter((_, i) => i % 2 === 0);
    this.#figure("position", count(found.position));
    this.#figure("held", count(found.blocks));
    this.#figure("stock", count(stock));
    this.#part("figure").hidden = false;
    this.#draw();
  }

  #draw() {
    if (this.#readings.length) draw(this.#part(".plot"), this.#readings, this.#blockSize);
  }

  #show(stream) {
    this.node.dataset.state = stream.state;
    this.#text(".state", SHOWN[stream.state]);
    this.#part("[data-do=stop]").disabled = !stream.isOpen;
    this.#part("[data-do=mute]").disabled = !stream.isOpen;
    this.#part("[data-do=remove]").disabled = stream.isOpen;
    if (stream.firstS !== null) {
      this.#figure("first", `${Math.round(stream.firstS * 1000)} ms`);
      this.#figure("made", seconds(stream.madeS));
      this.#figure("factor", (stream.tookS / stream.madeS).toFixed(2));
      this.#figure("ahead", seconds(stream.aheadS));
      const silence = stream.underruns ? `, ${seconds(stream.silenceS)} of silence` : "";
      this.#figure("underruns", `${stream.underruns}${silence}`);
    }
    if (stream.failure) {
      this.#text(".error", wordsOf(stream.failure));
      this.#part(".error").hidden = false;
    }
  }

  #figure(name, text) {
    this.#text(`[data-figure=${name}]`, text);
  }

  #text(selector, text) {
    const part = this.#part(selector);
    if (part.textContent !== text) part.textContent = text;
  }

  #part(selector) {
    return this.node.querySelector(selector);
  }
}
