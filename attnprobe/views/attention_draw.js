"use strict";
// Canvases: a head's matrix small and large, and arcs over the text. Shade goes by √weight.

const MOST_ARCS = 4000;
const FAINTEST_ARC = 0.05;  // of all words; of one chosen word: a tenth of it

const styleOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = colour => [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
const mixed = (one, two, share) => one.map((x, at) => Math.round(x + (two[at] - x) * share));
// Black or white, what reads better on a colour, by its luminance as WCAG defines it.
function inkOn(colour) {
  const [r, g, b] = colour.map(one => one / 255)
    .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

const shade = weight => Math.sqrt(Math.min(1, weight));

// A canvas as sharp as the screen; gives its context, in CSS pixels.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  Object.assign(canvas.style, {width: `${width}px`, height: `${height}px`});
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

// A picture of weights of at most `most` pixels a side. Where a pixel stands for several weights it
// shows the largest, so that no line of them is lost.
function matrixPicture({weights, size}, colour, most) {
  const side = Math.min(size, most), largest = new Float32Array(side * side).fill(MASKED);
  const place = Uint16Array.from({length: size}, (_, at) => Math.floor(at * side / size));
  for (let query = 0; query < size; query++) {
    const row = place[query] * side;
    for (let key = 0; key < size; key++) {
      const to = row + place[key], weight = weights[query * size + key];
      if (weight > largest[to]) largest[to] = weight;
    }
  }
  const paper = channels(styleOf("--paper")), masked = channels(styleOf("--masked"));
  const shades = Array.from({length: 256}, (_, at) => mixed(paper, channels(colour), at / 255));
  const picture = new ImageData(side, side);
  largest.forEach((weight, at) => {
    const one = weight === MASKED ? masked : shades[Math.round(255 * shade(weight))];
    picture.data.set([...one, 255], 4 * at);
  });
  const canvas = make("canvas", {width: side, height: side});
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}

function drawScaled(context, picture, x, y, side) {
  context.imageSmoothingEnabled = false;
  context.drawImage(picture, x, y, side, side);
}

// Where the cells of the large matrix stand: the words beside them where there is room.
function matrixPlan(labels, room) {
  const size = labels.length;
  const context = make("canvas").getContext("2d");
  context.font = "12px sans-serif";
  const widest = Math.min(120, Math.max(...labels.map(one => context.measureText(one).width)));
  const cell = Math.min(26, (room - widest - 8) / size);
  if (cell < 11) return {margin: 0, cell: room / size, side: room, font: 0};
  const plan = {margin: Math.ceil(widest) + 8, cell, side: cell * size};
  return {...plan, font: Math.min(12, Math.floor(cell * 0.9))};
}

function drawMatrix(canvas, picture, labels, plan) {
  const context = sized(canvas, plan.margin + plan.side, plan.margin + plan.side);
  drawScaled(context, picture, plan.margin, plan.margin, plan.side);
  context.strokeStyle = styleOf("--line");
  context.strokeRect(plan.margin + .5, plan.margin + .5, plan.side - 1, plan.side - 1);
  if (!plan.margin) return;
  context.font = `${plan.font}px sans-serif`;
  context.fillStyle = styleOf("--ink");
  context.textBaseline = "middle";
  labels.forEach((label, at) => {
    const middle = plan.margin + (at + .5) * plan.cell;
    context.textAlign = "right";
    context.fillText(label, plan.margin - 4, middle, plan.margin - 6);
    context.save();
    context.translate(middle, plan.margin - 4);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(label, 0, 0, plan.margin - 6);
    context.restore();
  });
}

// A band over the chosen row, and a frame around one cell.
function drawMark(canvas, plan, row, key) {
  const context = sized(canvas, plan.margin + plan.side, plan.margin + plan.side);
  context.strokeStyle = styleOf("--mark");
  context.lineWidth = 1.5;
  const thick = Math.max(plan.cell, 3);
  const from = at => plan.margin + (at + .5) * plan.cell - thick / 2;
  if (row !== null) context.strokeRect(plan.margin, from(row), plan.side, thick);
  if (key !== null) context.strokeRect(from(key), plan.margin, thick, plan.side);
}

// The arcs to draw, [head, query, key, weight], weakest first: those of one query, or the strongest.
function arcsOf(heads, matrices, query) {
  const found = [], size = matrices[0].size;
  const least = query === null ? FAINTEST_ARC : FAINTEST_ARC / 10;
  const [from, to] = query === null ? [0, size] : [query, query + 1];
  for (const head of heads) {
    for (let row = from; row < to; row++) {
      for (let key = 0; key < size; key++) {
        const weight = matrices[head].weights[row * size + key];
        if (weight >= least) found.push([head, row, key, weight]);
      }
    }
  }
  return found.sort((one, two) => one[3] - two[3]).slice(-MOST_ARCS);
}

// Each arc runs from its query to its key: over the words, beside them, or from place to place.
const ARC_PATHS = {
  horizontal(context, from, to, room) {
    const [x, y, end] = [from.x + from.width / 2, from.y, to.x + to.width / 2];
    const high = Math.min(room, Math.abs(x - end) * 0.5 + 14);
    if (x === end) return context.arc(x, y - 6, 5, 0, 2 * Math.PI);
    context.moveTo(x, y);
    context.bezierCurveTo(x, y - high * 1.33, end, y - high * 1.33, end, y);
  },
  vertical(context, from, to, room) {
    const [x, y, end] = [from.x, from.y + from.height / 2, to.y + to.height / 2];
    const wide = Math.min(room, Math.abs(y - end) * 0.5 + 14);
    if (y === end) return context.arc(x - 6, y, 5, 0, 2 * Math.PI);
    context.moveTo(x, y);
    context.bezierCurveTo(x - wide * 1.33, y, x - wide * 1.33, end, x, end);
  },
  wrapped(context, from, to) {
    const [x, y] = [from.x + from.width / 2, from.y + from.height / 2];
    const [endX, endY] = [to.x + to.width / 2, to.y + to.height / 2];
    if (x === endX && y === endY) return context.arc(x, from.y, 5, 0, 2 * Math.PI);
    const bend = Math.min(60, Math.abs(x - endX) * 0.25 + 8);
    context.moveTo(x, y);
    context.quadraticCurveTo((x + endX) / 2, Math.min(y, endY) - bend, endX, endY);
  },
};

// Draws the arcs that touch the part of the text in sight: `box` is {width, height, left, top}.
function drawArcs(canvas, arcs, places, layout, box, colours) {
  const context = sized(canvas, box.width, box.height);
  context.translate(-box.left, -box.top);
  const [start, length, from, to] = layout === "horizontal"
    ? ["x", "width", box.left, box.left + box.width]
    : ["y", "height", box.top, box.top + box.height];
  for (const [head, query, key, weight] of arcs) {
    const [one, two] = [places[query], places[key]];
    const first = Math.min(one[start], two[start]);
    const last = Math.max(one[start] + one[length], two[start] + two[length]);
    if (last < from || first > to) continue;
    context.beginPath();
    context.strokeStyle = colours[head];
    context.globalAlpha = 0.15 + 0.85 * shade(weight);
    context.lineWidth = 0.75 + 3 * weight;
    ARC_PATHS[layout](context, one, two, box.room);
    context.stroke();
  }
}
