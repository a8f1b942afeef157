// One frame of the timelines, on the canvas. It reads the state and changes none of it.

const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const LEAST_LABEL = 34;
const GUTTER_PAD = 10;
const TITLE_END = 500;

/** Draws rows, spans, marks, ends and axis. */
class Painter {
  constructor(canvas, names) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.names = names;
    this.labels = new Map();
    this.strips = new Strips();
    this.readColours();
  }

  /** The colours of the page's style; again when light turns dark. */
  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = new Map(); // asking a style takes longer than drawing
    this.colour = (name) => {
      if (!read.has(name)) read.set(name, style.getPropertyValue(`--${name}`).trim());
      return read.get(name);
    };
    this.fills = KINDS.map((kind) => this.colour(kind.key));
    this.inks = KINDS.map((kind) => this.colour(`on-${kind.key}`));
    this.rgb = this.fills.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  }

  /** Fits the canvas to its place on the page. */
  resize(width, rows) {
    const ratio = window.devicePixelRatio || 1;
    this.ratio = ratio;
    this.width = width;
    this.rows = rows;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(rows.height * ratio);
    this.canvas.style.height = `${rows.height}px`;
    this.font(12);
    const widest = Math.max(...rows.rows.map((row) => this.context.measureText(row.label).width), 60);
    this.left = Math.round(Math.min(widest, width * 0.25)) + 2 * GUTTER_PAD;
    this.right = width - 12;
  }

  font(size, weight = 400) {
    this.context.font = `${weight} ${size}px ${FONT}`;
  }

  x(us) {
    return this.left + ((us - this.view.startUs) / this.view.lengthUs) * (this.right - this.left);
  }

  timeAt(x) {
    return this.view.startUs + ((x - this.left) / (this.right - this.left)) * this.view.lengthUs;
  }

  /** `scene`: view, timelines (a panel each), marks of the selected diagnosis, focus, top and bottom that are on the screen. */
  draw(scene) {
    const { context: c, rows } = this;
    this.view = scene.view;
    this.scene = scene;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.textBaseline = "middle";
    c.fillStyle = this.colour("paper");
    c.fillRect(0, 0, this.width, rows.height);
    this.shown = rows.rows.filter((row) => row.flagTop < scene.bottom && row.top + row.height > scene.top);
    this.grid();
    c.save();
    c.beginPath();
    c.rect(this.left, 0, this.right - this.left, rows.height);
    c.clip();
    this.spans();
    const marks = this.marks();
    c.restore();
    this.gutter();
    this.heads();
    this.ends();
    this.overview();
    return marks;
  }

  grid() {
    const { context: c, view } = this;
    const step = roundStep(view.lengthUs, (this.right - this.left) / 90);
    const words = tickWords(step, view.wholeEndUs);
    this.font(11);
    c.textAlign = "center";
    for (let n = Math.ceil(view.startUs / step); n * step <= view.endUs; n++) {
      const x = Math.round(this.x(n * step)) + 0.5;
      c.fillStyle = this.colour("rule");
      for (const panel of this.rows.panels) c.fillRect(x - 0.5, panel.rowsTop, 1, panel.bottom - panel.rowsTop);
      c.fillRect(x - 0.5, AXIS_HEIGHT - 6, 1, 5);
      c.fillStyle = this.colour("soft");
      c.fillText(words(n * step), Math.min(Math.max(x, this.left + 8), this.right - 16), AXIS_HEIGHT - 14);
    }
    for (const row of this.shown) {
      c.fillStyle = this.colour(row.isNewGroup ? "edge" : "rule");
      if (row.isNewGroup) c.fillRect(0, row.flagTop - GROUP_GAP / 2, this.right, 1);
      c.fillStyle = this.colour("lane");
      c.fillRect(this.left, row.top, this.right - this.left, row.height);
    }
  }

  spans() {
    const { context: c, view, strips } = this;
    const width = this.right - this.left;
    strips.begin(Math.max(Math.round(width * this.ratio), 1), Math.max(this.rows.rows.length * KINDS.length, 1), this.rgb);
    const parts = this.shown.map((row) => {
      const lane = this.scene.timelines[row.panel].lanes[row.lane];
      const wide = [];
      return { row, lane, wide, lines: strips.add(lane, view.startUs, view.endUs, wide) };
    });
    strips.end();
    c.imageSmoothingEnabled = false;
    for (const { row, lane, wide, lines } of parts) {
      for (const { kind, line } of lines) {
        const [y, height] = bar(row, kind);
        c.drawImage(strips.canvas, 0, line, strips.numColumns, 1, this.left, y, width, height);
      }
      for (const n of wide) this.rectangle(row, lane, n);
    }
    this.font(11);
    c.textAlign = "left";
    for (const { row, lane, wide } of parts) if (row.height >= 14) for (const n of wide) this.name(row, lane, n);
  }

  rectangle(row, lane, n) {
    const { context: c } = this;
    const kind = lane.kinds[n];
    const [y, height] = bar(row, kind);
    const x = Math.max(this.x(lane.starts[n]), this.left - 2);
    const right = Math.min(this.x(lane.ends[n]), this.right + 2);
    c.fillStyle = this.fills[kind];
    c.fillRect(x, y, right - x - 0.75, height);
  }

  name(row, lane, n) {
    const x = Math.max(this.x(lane.starts[n]), this.left);
    const room = Math.min(this.x(lane.ends[n]), this.right) - x - 8;
    if (room < LEAST_LABEL) return;
    const text = this.fitted(shortNameOf(this.labels, this.names[lane.names[n]]), room);
    this.context.fillStyle = this.inks[lane.kinds[n]];
    this.context.fillText(text, x + 4, row.top + row.height / 2 + 0.5);
  }

  /** A text, cut to this width. */
  fitted(label, room) {
    label.width ??= this.context.measureText(label.text).width;
    if (label.width <= room) return label.text;
    const letters = Math.floor((label.text.length * room) / label.width) - 1;
    return letters < 2 ? "" : `${label.text.slice(0, letters)}…`;
  }

  /** Outlines of the selected diagnosis's marks, each with a flag where there is room for one. */
  marks() {
    const { context: c, view } = this;
    const pixelUs = view.lengthUs / (this.right - this.left);
    const drawn = [];
    for (const row of this.shown) {
      if (row.panel !== 0) continue;
      let free = this.left;
      for (const mark of joinedMarks(this.scene.marks, row.lane, pixelUs)) {
        if (mark.endUs < view.startUs || mark.startUs > view.endUs) continue;
        const left = Math.max(this.x(mark.startUs), this.left - 3);
        const right = Math.max(Math.min(this.x(mark.endUs), this.right + 3), left + 4);
        c.strokeStyle = this.colour("mark");
        c.lineWidth = 2;
        c.strokeRect(left - 1, row.top - 2, right - left + 2, row.height + 4);
        free = this.flag(mark, row, left - 2, free);
        drawn.push(mark);
      }
    }
    return drawn;
  }

  flag(mark, row, x, free) {
    const { context: c } = this;
    this.font(11, 600);
    const text = mark.count > 1 ? `${mark.label} × ${mark.count}` : mark.label;
    const width = c.measureText(text).width + 10;
    const left = Math.max(Math.min(x, this.right - width), this.left);
    c.fillStyle = this.colour("mark");
    if (left < free) {
      c.fillRect(x, row.top - 6, 4, 5);
      return free;
    }
    c.fillRect(left, row.flagTop, width, FLAG_HEIGHT - 2);
    c.fillStyle = this.colour("on-mark");
    c.textAlign = "left";
    c.fillText(text, left + 5, row.flagTop + (FLAG_HEIGHT - 2) / 2 + 0.5);
    return left + width + 4;
  }

  gutter() {
    const { context: c } = this;
    c.textAlign = "right";
    for (const row of this.shown) {
      const isFocused = this.scene.focus && this.scene.focus.row === row;
      this.font(12, isFocused ? 700 : 400);
      c.fillStyle = this.colour(isFocused ? "ink" : "soft");
      const text = this.fitted({ text: row.label }, this.left - GUTTER_PAD);
      if (row.height >= 8) c.fillText(text, this.left - GUTTER_PAD, row.top + row.height / 2 + 0.5);
      if (isFocused) c.fillRect(this.left - 4, row.top, 3, row.height);
    }
    if (this.scene.focus && this.scene.focus.span >= 0) this.focusRing();
  }

  focusRing() {
    const { context: c } = this;
    const { row, span } = this.scene.focus;
    const lane = this.scene.timelines[row.panel].lanes[row.lane];
    const left = this.x(lane.starts[span]);
    const right = Math.max(this.x(lane.ends[span]), left + 2);
    if (right < this.left || left > this.right) return;
    c.lineWidth = 2;
    c.strokeStyle = this.colour("focus");
    const from = Math.max(left - 1.5, this.left);
    c.strokeRect(from, row.top + 0.5, Math.min(right + 1.5, this.right) - from, row.height - 1);
  }

  /** The panels' titles. */
  heads() {
    const { context: c } = this;
    const [now, fixed] = this.scene.timelines;
    c.textAlign = "left";
    this.rows.panels.forEach((panel, number) => {
      const title = number ? "after the fix, as predicted" : "now";
      const more = number ? `${lengthWords(fixed.endUs)}, ${difference(now.endUs, fixed.endUs)}` : lengthWords(now.endUs);
      const y = panel.top + HEAD_HEIGHT / 2 + 2;
      this.font(13, 700);
      c.fillStyle = this.colour("ink");
      c.fillText(title, GUTTER_PAD, y);
      const width = c.measureText(title).width;
      this.font(13);
      c.fillStyle = this.colour(number ? "saved" : "soft");
      c.fillText(more, GUTTER_PAD + width + 10, y);
    });
  }

  /** Where each timeline ends; between the two, what the fix wins. */
  ends() {
    const [now, fixed] = this.scene.timelines;
    const [upper, lower] = this.rows.panels;
    if (fixed && lower) this.won(now.endUs, fixed.endUs, lower);
    this.endLine(now.endUs, upper.rowsTop - 4, (lower ?? upper).bottom, "ink", Boolean(lower));
    if (fixed && lower) this.endLine(fixed.endUs, lower.rowsTop - 4, lower.bottom, "saved", false);
  }

  endLine(us, top, bottom, colour, isDashedBelow) {
    const { context: c } = this;
    const x = Math.round(this.x(us));
    if (x < this.left || x > this.right + 1) return;
    c.fillStyle = this.colour(colour);
    const solid = isDashedBelow ? this.rows.panels[0].bottom : bottom;
    c.fillRect(x - 1, top, 2, solid - top);
    for (let y = solid + 4; y < bottom; y += 8) c.fillRect(x - 1, y, 2, 4);
  }

  won(nowUs, fixedUs, panel) {
    const { context: c } = this;
    const left = Math.max(this.x(Math.min(nowUs, fixedUs)), this.left);
    const right = Math.min(this.x(Math.max(nowUs, fixedUs)), this.right);
    if (right - left < 2) return;
    c.fillStyle = this.colour("won");
    c.fillRect(left, panel.rowsTop, right - left, panel.bottom - panel.rowsTop);
    c.fillStyle = this.colour("saved");
    const text = difference(nowUs, fixedUs);
    this.font(15, 700);
    if (c.measureText(text).width + 16 <= right - left) {
      c.textAlign = "center";
      c.fillText(text, (left + right) / 2, (panel.rowsTop + panel.bottom) / 2);
      return;
    }
    // Too narrow for words: they stand beside it, above the lanes, unless they would meet the panel's title.
    const y = panel.rowsTop - 8;
    this.font(12, 700);
    if (left - c.measureText(text).width - 8 < TITLE_END) return;
    c.fillRect(left, y - 0.5, right - left, 1.5);
    c.textAlign = "right";
    c.fillText(text, left - 6, y);
  }

  /** A strip with the whole of time: the visible part, and the marks. */
  overview() {
    const { context: c, view } = this;
    const width = this.right - this.left;
    const wholeUs = view.wholeEndUs - view.wholeStartUs;
    const at = (us) => this.left + ((us - view.wholeStartUs) / wholeUs) * width;
    c.fillStyle = this.colour("lane");
    c.fillRect(this.left, OVERVIEW_TOP, width, OVERVIEW_HEIGHT);
    c.fillStyle = this.colour("window");
    const seen = Math.max(at(view.endUs) - at(view.startUs), 3);
    c.fillRect(at(view.startUs), OVERVIEW_TOP, seen, OVERVIEW_HEIGHT);
    c.fillStyle = this.colour("mark");
    for (const [, startUs, endUs] of this.scene.marks) {
      c.fillRect(at(startUs), OVERVIEW_TOP + 3, Math.max(at(endUs) - at(startUs), 2), OVERVIEW_HEIGHT - 6);
    }
  }
}

/** Top and height of a span of this kind in its row. */
function bar(row, kind) {
  const height = Math.round(row.height * KINDS[kind].height);
  return [row.top + Math.round((row.height - height) / 2), height];
}

function shortNameOf(labels, name) {
  let label = labels.get(name);
  if (!label) labels.set(name, (label = { text: shortName(name) }));
  return label;
}
