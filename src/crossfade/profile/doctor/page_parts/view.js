// The part of time that is seen: where it is, how it moves, and where it may go. Microseconds.

const LEAST_SEEN_US = 0.2;
const MOVE_MS = 180;

/** The visible range. `zoom` and `pan` act at once, `go` moves there in a few frames. */
class View {
  constructor(wholeStartUs, wholeEndUs) {
    this.wholeStartUs = wholeStartUs;
    this.wholeEndUs = Math.max(wholeEndUs, wholeStartUs + LEAST_SEEN_US);
    this.startUs = this.wholeStartUs;
    this.endUs = this.wholeEndUs;
    this.move = null;
  }

  get lengthUs() {
    return this.endUs - this.startUs;
  }

  get isWhole() {
    return this.lengthUs >= (this.wholeEndUs - this.wholeStartUs) * 0.9999;
  }

  get isMoving() {
    return this.move !== null;
  }

  /** Sees `factor` times as much; what is at `atUs` stays where it is. */
  zoom(factor, atUs) {
    const lengthUs = this.allowedLength(this.lengthUs * factor);
    const share = (atUs - this.startUs) / this.lengthUs;
    this.set(atUs - share * lengthUs, atUs + (1 - share) * lengthUs);
  }

  pan(byUs) {
    this.set(this.startUs + byUs, this.endUs + byUs);
  }

  /** Sees this range at once, or the nearest one that is allowed. */
  set(startUs, endUs) {
    this.move = null;
    [this.startUs, this.endUs] = this.allowed(startUs, endUs);
  }

  /** Moves to this range; at once for readers who want no motion. */
  go(startUs, endUs) {
    const to = this.allowed(startUs, endUs);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.set(...to);
    else this.move = { from: [this.startUs, this.endUs], to, sinceMs: null };
  }

  /** Where it is going, or is. */
  get goal() {
    return this.move ? this.move.to : [this.startUs, this.endUs];
  }

  /** The state at this moment of the display's clock. */
  step(nowMs) {
    if (!this.move) return;
    this.move.sinceMs ??= nowMs;
    const { from, to, sinceMs } = this.move;
    const part = Math.min((nowMs - sinceMs) / MOVE_MS, 1);
    const eased = 1 - (1 - part) ** 3;
    // The length changes by factors and not by differences: else most of a long way would pass in the first frame.
    const lengthUs = (from[1] - from[0]) * ((to[1] - to[0]) / (from[1] - from[0])) ** eased;
    const change = from[1] - from[0] - (to[1] - to[0]);
    const share = Math.abs(change) < 1e-9 ? eased : (from[1] - from[0] - lengthUs) / change;
    this.startUs = from[0] + (to[0] - from[0]) * share;
    this.endUs = this.startUs + lengthUs;
    if (part === 1) this.set(...to);
  }

  allowed(startUs, endUs) {
    const lengthUs = this.allowedLength(endUs - startUs);
    const middleUs = (startUs + endUs) / 2;
    const first = Math.min(Math.max(middleUs - lengthUs / 2, this.wholeStartUs), this.wholeEndUs - lengthUs);
    return [first, first + lengthUs];
  }

  allowedLength(lengthUs) {
    return Math.min(Math.max(lengthUs, LEAST_SEEN_US), this.wholeEndUs - this.wholeStartUs);
  }
}
