"use strict";
// The page of attention_view: what is chosen, and what follows from it.

const at = id => document.getElementById(id);
const state = {
  layer: 0, head: 0, arcs: new Set([0]), by: DATA.by, first: "kept",
  layout: DATA[`${DATA.by}s`].length > 40 ? "wrapped" : "horizontal",
  chosen: null, hovered: null, cell: null,
};
let byTokens = [];  // each head of the layer by token, as `byToken` gives it
let matrices = [];  // as it is shown: {weights, rest, size}
let labels = [];
let spans = [];
let places = [];  // where each word stands in the text
let arcs = [];
let plan = null;  // of the large matrix

const active = () => state.hovered ?? state.chosen;
const numberOf = (query, key) => {
  const shown = matrices[state.head];
  const [byWord, scaled] = [state.by === "word", state.first === "renormalised"];
  const error = errorOf(byTokens[state.head], shown, query, key, byWord, scaled);
  return shownWeight(shown.weights[query * shown.size + key], error);
};
const quoted = word => `“${labels[word]}”`;

// What is computed: from the choices to matrices.

async function compute() {
  const layer = state.layer;
  const found = await byToken(layer);
  if (layer !== state.layer) return false;  // another was chosen meanwhile
  byTokens = found;
  matrices = state.by === "word" ? found.map(toWords) : found;
  if (state.first !== "kept") {
    matrices = matrices.map(one => withoutFirst(one, state.first === "renormalised"));
  }
  labels = DATA[`${state.by}s`];
  return true;
}

async function refresh() {
  if (!await compute()) return;
  if (spans.length !== labels.length || spans.by !== state.by) writeWords();
  for (const key of ["chosen", "hovered"]) if (state[key] >= labels.length) state[key] = null;
  drawHeads();
  showHead();
}

// What is drawn: thumbnails, the head, the word.

function drawHeads() {
  DATA.heads.forEach((_, head) => {
    const side = Math.min(labels.length, 120);
    const canvas = at(`head-${head}`);
    canvas.width = canvas.height = side;
    const picture = matrixPicture(matrices[head], DATA.colours[head], side);
    drawScaled(canvas.getContext("2d"), picture, 0, 0, side);
  });
}

function showHead() {
  document.querySelectorAll(".head").forEach((box, head) => {
    box.classList.toggle("focused", head === state.head);
    box.querySelector("button").ariaPressed = head === state.head;
    box.querySelector("input").checked = state.arcs.has(head);
  });
  plan = matrixPlan(labels, Math.max(240, Math.min(520, innerWidth - 40)));
  const most = Math.round(plan.side * (window.devicePixelRatio || 1));
  const colour = DATA.colours[state.head];
  const picture = matrixPicture(matrices[state.head], colour, most);
  drawMatrix(at("matrix"), picture, labels, plan);
  drawScale(colour);
  showWord();
}

function drawScale(colour) {
  const context = sized(at("shades"), 100, 10);
  const paper = channels(styleOf("--paper"));
  for (let x = 0; x < 100; x++) {
    context.fillStyle = `rgb(${mixed(paper, channels(colour), shade(x / 99))})`;
    context.fillRect(x, 0, 1, 10);
  }
}

function showWord() {
  const word = active();
  const {weights, size} = matrices[state.head];
  const paper = channels(styleOf("--paper")), colour = channels(DATA.colours[state.head]);
  spans.forEach((span, key) => {
    const weight = word === null ? 0 : Math.max(0, weights[word * size + key]);
    const behind = mixed(paper, colour, shade(weight));
    Object.assign(span.style, weight
      ? {background: `rgb(${behind})`, color: inkOn(behind)}
      : {background: "", color: ""});
    span.classList.toggle("chosen", key === state.chosen);
    span.classList.toggle("hovered", key === state.hovered);
  });
  drawMark(at("mark"), plan, state.cell ? state.cell[0] : word, state.cell ? state.cell[1] : null);
  writeLists(word);
  writeReadout();
  arcs = arcsOf(state.arcs, matrices, word);
  redrawArcs();
}

function redrawArcs() {
  const text = at("text");
  const box = {width: text.clientWidth, height: text.clientHeight};
  Object.assign(box, {left: text.scrollLeft, top: text.scrollTop});
  box.room = state.layout === "vertical" ? 235 : 175;
  const shown = state.layout === "wrapped" && active() === null ? [] : arcs;
  drawArcs(at("arcs"), shown, places, state.layout, box, DATA.colours);
}

// What is written.

function writeWords() {
  spans = labels.map((label, word) => make("span", {textContent: label || " ", dataset: {word}}));
  spans.by = state.by;
  at("words").replaceChildren(...spans);
  at("text").dir = isRightToLeft() ? "rtl" : "ltr";
  placeWords();
  search();
}

// By the first letter that says so, as dir="auto" has it.
function isRightToLeft() {
  const first = labels.join(" ").match(/\p{Script=Hebrew}|\p{Script=Arabic}|\p{L}/u);
  return first !== null && /[\p{Script=Hebrew}\p{Script=Arabic}]/u.test(first[0]);
}

function placeWords() {
  at("frame").className = state.layout;
  const text = at("text"), frame = text.getBoundingClientRect();
  places = spans.map(span => {
    const {left, top, width, height} = span.getBoundingClientRect();
    const x = left - frame.left + text.scrollLeft, y = top - frame.top + text.scrollTop;
    return {x, y, width, height};
  });
}

function writeReadout() {
  const name = `Layer ${DATA.layer_numbers[state.layer]}, head ${DATA.heads[state.head]}`;
  let said = name;
  if (state.cell) {
    const [query, key] = state.cell;
    said = `${name}: ${quoted(query)} → ${quoted(key)}: ${numberOf(query, key)}`;
  } else if (active() !== null) {
    said = `${name}: ${quoted(active())}, ${state.by} ${active()}`;
  }
  at("readout").textContent = said;
}

function writeLists(word) {
  if (word === null) return at("lists").replaceChildren("Hover or click a word: where it looks.");
  const list = (heading, reverse) => {
    const found = strongest(matrices[state.head], word, reverse, 10);
    const rows = found.map(([other, weight]) => make("tr", {},
      make("td", {className: "position", textContent: other}),
      make("td", {className: "word", textContent: labels[other]}),
      make("td", {className: "number", textContent: reverse ? numberOf(other, word) : numberOf(word, other)}),
      make("td", {className: "bar"}, make("div", {
        style: {width: `${100 * weight}%`, background: DATA.colours[state.head]},
      }))));
    const rest = rows.length ? make("table", {}, make("tbody", {}, ...rows)) : "nothing";
    return make("section", {}, make("h2", {textContent: heading}), rest);
  };
  at("lists").replaceChildren(
    list(`${quoted(word)} attends to`, false), list(`${quoted(word)} is attended to by`, true));
}

// What is chosen.

function choose(changes, follow = refresh) {
  Object.assign(state, changes);
  return follow();
}

function chooseWord(word) {
  choose({chosen: word, hovered: null, cell: null}, showWord);
  if (word !== null) spans[word].scrollIntoView({block: "nearest", inline: "nearest"});
}

function stepWord(step) {
  const from = state.chosen ?? (step > 0 ? -1 : labels.length);
  chooseWord(Math.max(0, Math.min(labels.length - 1, from + step)));
}

function chooseHead(head, alone = true) {
  choose({head, arcs: alone ? new Set([head]) : state.arcs.add(head)}, showHead);
}

function chooseBy(by) {
  if (state.chosen !== null && by !== state.by) {
    state.chosen = by === "word"
      ? DATA.word_of[state.chosen]
      : DATA.word_of.lastIndexOf(state.chosen);
  }
  return choose({by, hovered: null, cell: null});
}

function chooseLayout(layout) {
  choose({layout}, () => { placeWords(); redrawArcs(); });
  if (state.chosen !== null) spans[state.chosen].scrollIntoView({block: "nearest"});
}

function search() {
  const asked = at("search").value.trim().toLowerCase();
  const hits = spans.filter((span, word) => {
    const hit = asked !== "" && labels[word].toLowerCase().includes(asked);
    span.classList.toggle("found", hit);
    return hit;
  });
  at("hits").textContent = asked === "" ? "" : `${hits.length} found`;
  return hits.map(span => +span.dataset.word);
}

function nextHit() {
  const hits = search();
  if (hits.length) chooseWord(hits.find(word => word > (state.chosen ?? -1)) ?? hits[0]);
}

// Controls.

function menu(id, label, options, value, then) {
  const items = options.map(([value, textContent]) => make("option", {value, textContent}));
  const select = make("select", {id, onchange: () => then(select.value)}, ...items);
  select.value = value;
  return make("label", {}, label, select);
}

function writeControls() {
  const numbered = DATA.layer_numbers.map((layer, index) => [index, layer]);
  at("controls").append(
    menu("layer", "Layer", numbered, 0, value => choose({layer: +value})),
    menu("by", "By", [["token", "token"], ["word", "word"]], state.by, chooseBy),
    menu("first", "First token", [["kept", "as it is"], ["hidden", "hidden"],
      ["renormalised", "hidden, the rest scaled to 1"]], "kept", first => choose({first})),
    menu("layout", "Text", [["wrapped", "wrapped"], ["horizontal", "in a row"],
      ["vertical", "in a column"]], state.layout, chooseLayout),
    make("label", {}, "Search", make("input", {id: "search", type: "search", size: 12,
      oninput: search, onkeydown: event => { if (event.key === "Enter") nextHit(); }})),
    make("span", {id: "hits"}),
    themeButton("Light / dark", () => { if (matrices.length) { drawHeads(); showHead(); } }),
    make("span", {id: "scale"}, "0", make("canvas", {id: "shades"}), "1, shade by √weight",
      make("span", {className: "masked"}), "masked"));
  at("heads").append(...DATA.heads.map((number, head) => make("div", {className: "head"},
    make("button", {type: "button", ariaLabel: `head ${number}`,
      onclick: event => chooseHead(head, !event.shiftKey)},
      make("canvas", {id: `head-${head}`})),
    make("label", {title: "draw its arcs"},
      make("input", {type: "checkbox", onchange: event => {
        state.arcs[event.target.checked ? "add" : "delete"](head);
        showHead();
      }}), `head ${number}`))));
}

const KEYS = {
  ArrowLeft: () => stepWord(isRightToLeft() ? 1 : -1),
  ArrowRight: () => stepWord(isRightToLeft() ? -1 : 1),
  ArrowUp: () => chooseHead(Math.max(0, state.head - 1)),
  ArrowDown: () => chooseHead(Math.min(DATA.heads.length - 1, state.head + 1)),
  PageUp: () => stepMenu("layer", -1),
  PageDown: () => stepMenu("layer", 1),
  Escape: () => chooseWord(null),
  "/": () => at("search").focus(),
  a: () => choose({arcs: new Set(state.arcs.size > 1 ? [state.head] : DATA.heads.keys())}, showHead),
  t: () => stepMenu("by", 1, true),
  f: () => stepMenu("first", 1, true),
  l: () => stepMenu("layout", 1, true),
};

function stepMenu(id, step, around = false) {
  const select = at(id), count = select.length;
  const to = select.selectedIndex + step;
  select.selectedIndex = around ? to % count : Math.max(0, Math.min(count - 1, to));
  select.onchange();
}

function listen() {
  const wordOf = event => event.target.dataset?.word === undefined ? null : +event.target.dataset.word;
  at("words").addEventListener("mouseover", event => choose({hovered: wordOf(event)}, showWord));
  at("words").addEventListener("mouseleave", () => choose({hovered: null}, showWord));
  at("words").addEventListener("click", event => {
    const word = wordOf(event);
    if (word !== null) chooseWord(word === state.chosen ? null : word);
  });
  at("text").addEventListener("scroll", redrawArcs, {passive: true});
  const cellOf = event => {
    const place = [event.offsetY, event.offsetX].map(x => Math.floor((x - plan.margin) / plan.cell));
    return place.every(one => one >= 0 && one < labels.length) ? place : null;
  };
  at("mark").addEventListener("mousemove", event => {
    const cell = cellOf(event);
    choose({cell, hovered: cell && cell[0]}, showWord);
  });
  at("mark").addEventListener("mouseleave", () => choose({cell: null, hovered: null}, showWord));
  at("mark").addEventListener("click", event => {
    const cell = cellOf(event);
    if (cell) chooseWord(cell[0]);
  });
  addEventListener("resize", () => { placeWords(); showHead(); });
  addEventListener("keydown", event => {
    const typing = event.target.matches("input[type=search], select");
    if (event.key === "Escape" && typing) event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}

writeControls();
refresh().then(listen).then(sayReady);  // not before there is something to show
