"use strict";
// What attnprobe's own pages share.

// A packed array: {values: a typed array, shape}.
async function unpack({type, shape, data}) {
  const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(stream).arrayBuffer();
  const kinds = {uint8: Uint8Array, uint16: Uint16Array, float32: Float32Array};
  return {values: new kinds[type](raw), shape};
}

// An element with properties and children; text stays text.
function make(name, properties = {}, ...children) {
  const {dataset = {}, style = {}, ...rest} = properties;
  const element = Object.assign(document.createElement(name), rest);
  Object.assign(element.dataset, dataset);
  Object.assign(element.style, style);
  element.append(...children);
  return element;
}

// Black or white, whichever reads better on a colour [r, g, b]: a contrast of at least 4.5, by its
// luminance as WCAG defines it.
function inkOn(colour) {
  const [red, green, blue] = colour.map(part => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000" : "#fff";
}

// Says, to whoever waits for it, that the page is drawn.
const sayReady = () => { document.documentElement.dataset.ready = "yes"; };

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// A button that goes from light to dark and back, and calls `then`.
function themeButton(label, then) {
  const turn = () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    then();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", then);
  return make("button", {id: "theme", type: "button", textContent: label, onclick: turn});
}
