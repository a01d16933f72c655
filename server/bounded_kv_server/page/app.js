// The page: its form, its keys, and a card for each stream.

import { hasKey, setKey } from "./api.js";
import { Card } from "./card.js";
import { Figures, stockBlocks } from "./figures.js";
import { wake } from "./player.js";
import { Voices } from "./voices.js";
import { count, plural, wordsOf } from "./words.js";

const at = (id) => document.getElementById(id);
const cards = new Set();
const voices = new Voices(at("voice"), at("forget"));
const figures = new Figures(() => open().length > 0, takeFigures);
// A browser has six connections to a server that speaks HTTP/1.1: one is for figures.
const MOST_COMING = 5;
let number = 0;

const open = () => [...cards].filter((card) => card.stream.isOpen);

function speak() {
  if (!at("speak").reportValidity()) return;
  wake();
  const text = at("text").value.trim();
  if (!text) return tell("There is nothing to say: type a text first.");
  if (open().filter((card) => card.stream.isComing).length >= MOST_COMING) {
    return tell(`${MOST_COMING} streams are as many as a browser can take in beside each other: stop one first.`);
  }
  number += 1;
  const card = new Card(number, text, voices.chosen, { onState, onRemove });
  cards.add(card);
  at("streams").prepend(card.node);
  onState(card);
  figures.start();
}

function onState(card) {
  tell(`${card.words}.`);
  at("stop-all").disabled = open().length === 0;
  if (card.stream.failure?.status === 401) askForKey();
  if (open().length === 0) at("server").textContent = "None sounds.";
}

function onRemove(card) {
  card.resizes.disconnect();
  cards.delete(card);
  const next = card.node.nextElementSibling ?? card.node.previousElementSibling ?? at("text");
  card.node.remove();
  next.focus();
}

// That of the focus, or all.
function stop() {
  const focused = open().filter((card) => card.node.contains(document.activeElement));
  for (const card of focused.length ? focused : open()) card.stream.stop();
}

function takeFigures(now) {
  for (const card of cards) card.take(now);
  const sum = (of) => now.streams.reduce((all, each) => all + of(each), 0);
  const held = count(sum((each) => each.blocks));
  const stock = count(sum((each) => stockBlocks(now, each)));
  at("server").textContent =
    `${plural(now.streams.length, "stream")} of this server, of at most ${count(now.slots_total)}: ` +
    `${held} blocks held, where stock vLLM would hold ${stock}.`;
}

function tell(words) {
  at("status").textContent = words;
}

function complain(failure) {
  at("notice").textContent = wordsOf(failure);
  at("notice").hidden = false;
  if (failure.status === 401) askForKey();
}

function askForKey() {
  at("access").open = true;
  at("key").focus();
}

// Runs what a button asks for; what goes wrong is said in the notice.
async function doing(button, work) {
  at("notice").hidden = true;
  if (button) button.disabled = true;
  try {
    await work();
  } catch (failure) {
    complain(failure);
  } finally {
    if (button) button.disabled = false;
  }
}

const load = () => doing(null, async () => tell(`${plural(await voices.load(), "voice")} to choose from.`));

at("speak").onsubmit = (event) => {
  event.preventDefault();
  speak();
};
at("stop-all").onclick = () => open().forEach((card) => card.stream.stop());
at("forget").onclick = () => doing(at("forget"), async () => tell(`The voice ${await voices.forget()} is forgotten.`));
at("upload").onsubmit = (event) => {
  event.preventDefault();
  const form = event.currentTarget;
  doing(form.querySelector("button"), async () => {
    tell("The voice is being made.");
    tell(`The voice ${await voices.add(new FormData(form))} is there.`);
    form.reset();
  });
};
at("unlock").onsubmit = (event) => {
  event.preventDefault();
  setKey(at("key").value);
  load();
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    speak();
  } else if (event.key === "Escape") {
    stop();
  }
});

at("access").open = hasKey();
load();
