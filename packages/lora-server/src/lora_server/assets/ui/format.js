// Numbers with their units, for people.

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const RATE = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 12345 -> "12,345". */
export function count(value) {
  return COUNT.format(value);
}

/** One digit after the point below a hundred, none above, and none for nothing. */
export function rate(value) {
  return value > 0 && value < 100 ? RATE.format(value) : COUNT.format(value);
}

/** 1536 -> ["1.5", "KiB"]. */
export function bytes(value) {
  let unit = 0;
  let shown = value;
  while (shown >= 1024 && unit < BYTE_UNITS.length - 1) {
    shown /= 1024;
    unit += 1;
  }
  return [unit === 0 ? count(shown) : rate(shown), BYTE_UNITS[unit]];
}

/** 0.25 -> ["250", "ms"]; 2.5 -> ["2.50", "s"]. */
export function duration(seconds) {
  if (seconds < 0.01) return [(seconds * 1000).toFixed(1), "ms"];
  if (seconds < 1) return [(seconds * 1000).toFixed(0), "ms"];
  return [seconds.toFixed(seconds < 10 ? 2 : 1), "s"];
}

/** "1 word", "2 words". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
