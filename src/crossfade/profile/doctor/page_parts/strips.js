// Spans too narrow for a rectangle each: how much of every screen column they cover, as one image.

const WIDE_COLUMNS = 4;
const FAINTEST = 0.04;

/**
 * A picture with a line for each kind of each lane, one pixel per column of the screen, which is drawn stretched to the lane's height.
 * What a frame costs depends on the number of spans seen and of pixels, and not on how spans are spread.
 */
class Strips {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
    this.numColumns = 0;
  }

  /** Begins a frame: this many columns, at most this many lines (one or more each). `colours`: of each kind, [red, green, blue]. */
  begin(numColumns, numLines, colours) {
    if (this.numColumns !== numColumns || this.canvas.height < numLines) {
      this.numColumns = numColumns;
      this.canvas.width = numColumns;
      this.canvas.height = numLines;
      this.covered = new Float32Array(numColumns * KINDS.length);
      this.image = new ImageData(numColumns, numLines);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.inks = colours.map(([red, green, blue]) => (blue << 16) | (green << 8) | red);
    this.numLines = 0;
  }

  /** Adds the narrow spans of a lane; `wide` gets the others. Returns the kinds that were added, each with its line. */
  add(lane, startUs, endUs, wide) {
    const { covered, numColumns } = this;
    const { starts, ends, kinds } = lane;
    const perUs = numColumns / (endUs - startUs);
    const last = lane.firstAfter(endUs);
    let seen = 0;
    for (let n = lane.firstFrom(startUs); n < last; n++) {
      const right = (ends[n] - startUs) * perUs;
      if (right < 0) continue;
      const left = (starts[n] - startUs) * perUs;
      if (right - left >= WIDE_COLUMNS) {
        wide.push(n);
        continue;
      }
      if (!(seen & (1 << kinds[n]))) {
        seen |= 1 << kinds[n];
        covered.fill(0, kinds[n] * numColumns, (kinds[n] + 1) * numColumns);
      }
      const base = kinds[n] * numColumns;
      const from = Math.max(left, 0);
      const column = Math.floor(from);
      if (right <= column + 1) {
        if (column < numColumns) covered[base + column] += Math.max(right - from, FAINTEST);
        continue;
      }
      covered[base + column] += column + 1 - from;
      const end = Math.min(right, numColumns);
      for (let next = column + 1; next < end; next++) covered[base + next] += Math.min(right - next, 1);
    }
    return this.lines(seen);
  }

  lines(seen) {
    const lines = [];
    for (let kind = 0; kind < KINDS.length; kind++) {
      if (!(seen & (1 << kind))) continue;
      const to = this.numLines * this.numColumns;
      const from = kind * this.numColumns;
      for (let column = 0; column < this.numColumns; column++) {
        const part = this.covered[from + column];
        // A column that is hardly covered is still seen, and one that is half covered does not look busy.
        const alpha = part === 0 ? 0 : 40 + 215 * Math.min(part, 1);
        this.pixels[to + column] = (Math.round(alpha) << 24) | this.inks[kind];
      }
      lines.push({ kind, line: this.numLines++ });
    }
    return lines;
  }

  /** Ends the frame: the lines can be drawn. */
  end() {
    if (this.numLines) this.context.putImageData(this.image, 0, 0, 0, 0, this.numColumns, this.numLines);
  }
}
