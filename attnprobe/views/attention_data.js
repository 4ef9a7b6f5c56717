"use strict";
// The weights of one layer, as the page shows them: by token or by word, with the first or without.

const MASKED = -1;

// The weight that each code stands for: codes are finer where weights are small, as eyes are.
const WEIGHT_OF = Float32Array.from({length: DATA.levels + 2},
  (_, code) => code ? ((code - 1) / DATA.levels) ** 2 : MASKED);

const unpackedLayers = new Map();

// By head: the weights of one layer by token, row by row, MASKED where a query may not attend; and
// what each row leaves to other keys than the first.
async function byToken(layer) {
  if (!unpackedLayers.has(layer)) {
    unpackedLayers.set(layer, Promise.all([unpack(DATA.weights[layer]), unpack(DATA.rests[layer])]));
  }
  const [codes, rests] = (await unpackedLayers.get(layer)).map(one => one.values);
  const size = DATA.tokens.length;
  let at = 0;
  return DATA.heads.map((_, head) => {
    const weights = new Float32Array(size * size).fill(MASKED);
    for (let query = 0; query < size; query++) {
      const keys = DATA.lower ? query + 1 : size;
      for (let key = 0; key < keys; key++) weights[query * size + key] = WEIGHT_OF[codes[at++]];
    }
    const own = rests.subarray(head * size, (head + 1) * size);
    const rest = Float32Array.from(own, code => code === 65535 ? 0 : Math.exp(-code / DATA.rest_steps));
    return {weights, rest, size};
  });
}

// The mean over the query word's tokens of the sum over the key word's (Clark et al. 2019).
function toWords({weights, rest, size: tokens}) {
  const of = DATA.word_of, size = DATA.words.length;
  const lengths = new Float32Array(size), left = new Float32Array(size);
  const summed = new Float32Array(size * size).fill(MASKED);
  for (let query = 0; query < tokens; query++) {
    const word = of[query];
    lengths[word]++;
    left[word] += rest[query];
    for (let key = 0; key < tokens; key++) {
      const weight = weights[query * tokens + key];
      if (weight === MASKED) continue;
      if (key > 0 && of[key] === of[0]) left[word] -= weight;  // the first word's other tokens
      const to = word * size + of[key];
      summed[to] = summed[to] === MASKED ? weight : summed[to] + weight;
    }
  }
  for (let word = 0; word < size; word++) {
    left[word] = Math.max(0, left[word] / lengths[word]);
    for (let to = word * size; to < (word + 1) * size; to++) {
      if (summed[to] !== MASKED) summed[to] /= lengths[word];
    }
  }
  return {weights: summed, rest: left, size};
}

// The weights without those on the first key, and the others scaled to sum to 1 where asked.
function withoutFirst({weights, rest, size}, scaled) {
  const first = DATA.word_of[0];
  const kept = Float32Array.from(weights);
  for (let query = 0; query < size; query++) {
    const row = query * size, left = rest[query];
    kept[row + first] = MASKED;
    if (!scaled || left === 0) continue;
    for (let to = row; to < row + size; to++) {
      if (kept[to] > 0) kept[to] = Math.min(1, kept[to] / left);
    }
  }
  return {weights: kept, rest, size};
}

// How far a weight by token may be from the model's: half a step of its code.
const rounding = weight =>
  weight === MASKED ? 0 : Math.sqrt(weight) / DATA.levels + 0.25 / DATA.levels ** 2;

// How far a shown weight may be from the model's; `tokens` is the head by token, `shown` as shown.
function errorOf(tokens, shown, query, key, byWord, scaled) {
  const members = word => byWord
    ? DATA.word_of.flatMap((one, token) => one === word ? [token] : [])
    : [word];
  const queries = members(query);
  const meanOver = keys => queries.reduce((sum, one) => sum + keys.reduce(
    (part, other) => part + rounding(tokens.weights[one * tokens.size + other]), 0), 0)
    / queries.length;
  const error = meanOver(members(key)), left = shown.rest[query];
  if (!scaled || left === 0) return error;
  const weight = Math.max(0, shown.weights[query * shown.size + key]);
  // What is left is the mean of what the tokens leave, less the first word's other tokens.
  const coded = queries.reduce((sum, one) => sum + tokens.rest[one], 0) / queries.length;
  const ofLeft = 0.5 / DATA.rest_steps * coded + meanOver(members(DATA.word_of[0]).slice(1));
  return (error + weight * ofLeft) / left;
}

// What a query attends to, or what attends to a key: [position, weight], strongest first.
function strongest({weights, size}, at, reverse, count) {
  const found = [];
  for (let other = 0; other < size; other++) {
    const weight = weights[reverse ? other * size + at : at * size + other];
    if (weight > 0) found.push([other, weight]);
  }
  return found.sort((one, two) => two[1] - one[1] || one[0] - two[0]).slice(0, count);
}

// A weight with three decimals, and how far it may be off where that shows in them.
function shownWeight(weight, error) {
  if (weight === MASKED) return "masked";
  const read = weight > 0 && weight < 0.001 ? "< 0.001" : weight.toFixed(3);
  return error < 0.0001 || read[0] === "<" ? read : `${read} ± ${error.toPrecision(1)}`;
}
