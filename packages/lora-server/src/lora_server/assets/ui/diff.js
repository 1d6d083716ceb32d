// Which words of one text another one does not have, by their longest common subsequence.

const MAX_CELLS = 4_000_000;
const WORD = /\s*\S+|\s+$/g;

/** Split a text into words, each with the white space before it; joined they are the text. */
export function wordsOf(text) {
  return text.match(WORD) ?? [];
}

/**
 * Compare a text with a base text.
 *
 * Returns `[{text, isSame, isAfterGap}]`, one entry a word of `text`, whose texts joined are
 * `text`; `isAfterGap` says that the base has words before it that `text` lacks.
 * `hasGapAtEnd` of the result says the same of the end.
 */
export function compare(baseText, text) {
  const base = wordsOf(baseText);
  const words = wordsOf(text);
  const match = matches(base.map((word) => word.trim()), words.map((word) => word.trim()));
  let next = 0;
  const entries = words.map((word, idx) => {
    const at = match[idx];
    const isSame = at !== -1;
    const isAfterGap = isSame && at > next && (idx === 0 || match[idx - 1] !== -1);
    if (isSame) next = at + 1;
    return { text: word, isSame, isAfterGap };
  });
  const endsSame = words.length === 0 || match[words.length - 1] !== -1;
  return { entries, hasGapAtEnd: endsSame && next < base.length };
}

/** For each of `words`, the position of its partner in `base`, or -1. */
function matches(base, words) {
  const match = new Array(words.length).fill(-1);
  let start = 0;
  while (start < base.length && start < words.length && base[start] === words[start]) {
    match[start] = start;
    start += 1;
  }
  let [baseEnd, end] = [base.length, words.length];
  while (baseEnd > start && end > start && base[baseEnd - 1] === words[end - 1]) {
    baseEnd -= 1;
    end -= 1;
    match[end] = baseEnd;
  }
  const [height, width] = [baseEnd - start, end - start];
  // Beyond this the table would take seconds; everything between two equal ends counts as changed.
  if (height * width > MAX_CELLS) return match;
  const stride = width + 1;
  const longest = new Uint32Array((height + 1) * stride);
  for (let i = height - 1; i >= 0; i -= 1) {
    for (let j = width - 1; j >= 0; j -= 1) {
      longest[i * stride + j] =
        base[start + i] === words[start + j]
          ? longest[(i + 1) * stride + j + 1] + 1
          : Math.max(longest[(i + 1) * stride + j], longest[i * stride + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < height && j < width; ) {
    if (base[start + i] === words[start + j]) {
      match[start + j] = start + i;
      i += 1;
      j += 1;
    } else if (longest[(i + 1) * stride + j] >= longest[i * stride + j + 1]) i += 1;
    else j += 1;
  }
  return match;
}
