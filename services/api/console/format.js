// @ts-check
// Numbers, sizes and times as people read them, in the language of the console.
import { language } from "./messages.js";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** @param {number | null | undefined} value a size in bytes @returns {string} */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  let size = value;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toLocaleString(language(), { maximumFractionDigits: unit ? (size < 10 ? 2 : 1) : 0 })} ${UNITS[unit]}`;
}

/** @param {number | null | undefined} value @param {number} [digits] @returns {string} */
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const magnitude = Math.abs(value);
  if (magnitude !== 0 && magnitude < 0.001) return value.toExponential(2);
  return value.toLocaleString(language(), { maximumFractionDigits: magnitude >= 1000 ? 0 : digits });
}

/** @param {number | null | undefined} value a share of one @returns {string} */
export function percent(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString(language(), { style: "percent", maximumFractionDigits: 1 });
}

/** @param {number | null | undefined} seconds @returns {string} */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  const two = (/** @type {number} */ value) => String(value).padStart(2, "0");
  if (hours) return `${hours}:${two(minutes)}:${two(whole % 60)} h`;
  return minutes ? `${minutes}:${two(whole % 60)} min` : `${whole} s`;
}

/** @param {string | number | null | undefined} time ISO 8601, or seconds since the epoch @returns {string} */
export function moment(time) {
  if (time === null || time === undefined) return "–";
  const date = typeof time === "number" ? new Date(time * 1000) : new Date(time);
  return date.toLocaleString(language(), { dateStyle: "short", timeStyle: "medium" });
}

/** @param {string | null | undefined} from @param {string | null | undefined} to @returns {number | null} seconds */
export function secondsBetween(from, to) {
  if (!from) return null;
  return ((to ? Date.parse(to) : Date.now()) - Date.parse(from)) / 1000;
}
