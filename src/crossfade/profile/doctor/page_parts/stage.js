// The timelines as something to look at and to move in: what is seen, what is focused, and the frames.

const MOST_FRAMES = 2000;
const SLACK_PX = 3;

/** The canvas with its state. What changes the state asks for a frame; frames are drawn when the display wants one. */
class Stage {
  constructor(report) {
    this.report = report;
    this.canvas = document.getElementById("timeline");
    this.tip = document.getElementById("tip");
    this.now = new Timeline(report.now, report.lanes.length);
    this.fixed = new Map();
    const lanes = this.now.lanes.filter((lane) => lane.length); // a host may have calls after the end, when all work is done
    const startUs = Math.min(0, ...lanes.map((lane) => lane.starts[0]));
    const ends = report.diagnoses.map((diagnosis) => (diagnosis.fixed ? diagnosis.fixed.end_us : 0));
    const endUs = Math.max(report.now.end_us, ...ends, ...lanes.map((lane) => lane.reach[lane.length - 1]));
    this.view = new View(startUs, endUs + (endUs - startUs) * 0.015);
    this.painter = new Painter(this.canvas, report.names);
    this.diagnosis = null;
    this.marks = [];
    this.drawnMarks = [];
    this.currentMark = -1;
    this.wantsFixed = true;
    this.focus = null;
    this.frames = [];
    this.isAsked = false;
    new ResizeObserver(() => {
      if (this.canvas.parentElement.clientWidth !== this.painter.width) this.layOut();
    }).observe(this.canvas.parentElement);
  }

  /** The timelines that are drawn: now, and after the fix where that is wanted and known. */
  get timelines() {
    const fixed = this.wantsFixed && this.diagnosis && this.diagnosis.fixed;
    if (!fixed) return [this.now];
    if (!this.fixed.has(fixed)) this.fixed.set(fixed, new Timeline(fixed, this.report.lanes.length));
    return [this.now, this.fixed.get(fixed)];
  }

  select(diagnosis) {
    this.diagnosis = diagnosis;
    this.marks = diagnosis ? [...diagnosis.marks].sort((one, other) => one[1] - other[1]) : [];
    this.currentMark = -1;
    this.layOut();
  }

  showFixed(isWanted) {
    this.wantsFixed = isWanted;
    this.layOut();
  }

  layOut() {
    const flagged = new Set(this.marks.map((mark) => mark[0]));
    const rows = new Rows(this.report.lanes, this.timelines.length, flagged);
    this.painter.resize(this.canvas.parentElement.clientWidth, rows);
    const old = this.focus && this.focus.row;
    const row = old && rows.rows.find((each) => each.panel === old.panel && each.lane === old.lane);
    this.focus = row ? { row, span: old.panel ? -1 : this.focus.span } : null;
    this.hideTip();
    this.draw(); // at once: a canvas that was resized is empty until it is drawn
  }

  ask() {
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame((nowMs) => {
      this.isAsked = false;
      this.view.step(nowMs);
      this.draw();
      if (this.view.isMoving) this.ask();
    });
  }

  draw() {
    const begunMs = performance.now();
    const { top } = this.canvas.getBoundingClientRect();
    this.drawnMarks = this.painter.draw({
      view: this.view,
      timelines: this.timelines,
      marks: this.marks,
      focus: this.focus,
      top: -top - innerHeight / 2,
      bottom: innerHeight * 1.5 - top,
    });
    if (this.frames.length === MOST_FRAMES) this.frames.shift();
    this.frames.push(performance.now() - begunMs);
  }

  zoom(factor, atUs = (this.view.startUs + this.view.endUs) / 2) {
    this.hideTip();
    this.view.zoom(factor, atUs);
    this.ask();
  }

  pan(share) {
    this.hideTip();
    this.view.pan(share * this.view.lengthUs);
    this.ask();
  }

  go(startUs, endUs) {
    this.hideTip();
    this.view.go(startUs, endUs);
    this.ask();
  }

  goWhole() {
    this.currentMark = -1;
    this.go(this.view.wholeStartUs, this.view.wholeEndUs);
  }

  /** To all marks of the diagnosis, with some room around. */
  goToMarks(marks = this.marks) {
    if (!marks.length) return this.goWhole();
    const startUs = Math.min(...marks.map((mark) => mark[1]));
    const endUs = Math.max(...marks.map((mark) => mark[2]));
    const roomUs = Math.max((endUs - startUs) * (marks.length > 1 ? 0.12 : 0.8), 5);
    this.go(startUs - roomUs, endUs + roomUs);
  }

  /** To the next mark, or the one before. Returns it. */
  goToMark(by) {
    if (!this.marks.length) return null;
    const first = by > 0 ? 0 : this.marks.length - 1;
    this.currentMark = this.currentMark < 0 ? first : (this.currentMark + by + this.marks.length) % this.marks.length;
    this.goToMarks([this.marks[this.currentMark]]);
    return this.marks[this.currentMark];
  }

  laneOf(row) {
    return this.timelines[row.panel].lanes[row.lane];
  }

  /** The row and span at a place of the canvas; null where there is no row. */
  hit(x, y) {
    const row = this.painter.rows.at(y);
    if (!row || x < this.painter.left || x > this.painter.right) return null;
    const slackUs = (SLACK_PX * this.view.lengthUs) / (this.painter.right - this.painter.left);
    return { row, span: this.laneOf(row).at(this.painter.timeAt(x), slackUs) };
  }

  /** Focuses the lane above or below; the first time, one that has marks. Returns its words. */
  focusRow(by) {
    const { rows } = this.painter.rows;
    if (!rows.length) return "no lanes";
    const marked = rows.find((row) => this.marks.some((mark) => mark[0] === row.lane));
    const at = this.focus ? rows.indexOf(this.focus.row) + by : rows.indexOf(marked ?? rows[0]);
    this.focus = { row: rows[Math.min(Math.max(at, 0), rows.length - 1)], span: -1 };
    this.hideTip();
    this.ask();
    return this.focus.row.label;
  }

  /** Focuses the next or previous span of the focused lane; the first time, the first one that is seen. Returns its words. */
  focusSpan(by) {
    if (!this.focus) this.focusRow(0);
    if (!this.focus) return "no lanes";
    const { row, span } = this.focus;
    const lane = this.laneOf(row);
    if (!lane.length) return "no spans in this lane";
    const to = span < 0 ? lane.firstFrom(this.view.startUs) : span + by;
    this.focus = { row, span: Math.min(Math.max(to, 0), lane.length - 1) };
    const middleUs = (lane.starts[this.focus.span] + lane.ends[this.focus.span]) / 2;
    if (middleUs < this.view.startUs || middleUs > this.view.endUs) this.view.pan(middleUs - this.view.startUs - this.view.lengthUs / 2);
    this.ask();
    this.showTip(this.focus, this.painter.x(middleUs), row.top + row.height);
    return this.words(this.focus).join(", ");
  }

  goToSpan({ row, span }) {
    if (span < 0) return;
    const lane = this.laneOf(row);
    const roomUs = (lane.ends[span] - lane.starts[span]) * 0.5 + 0.5;
    this.go(lane.starts[span] - roomUs, lane.ends[span] + roomUs);
  }

  forget() {
    this.focus = null;
    this.hideTip();
    this.ask();
  }

  words({ row, span }) {
    const lane = this.laneOf(row);
    const kind = KINDS[lane.kinds[span]].words;
    return [
      this.report.names[lane.names[span]],
      `${duration(lane.ends[span] - lane.starts[span])}, ${kind}`,
      `from ${moment(lane.starts[span])} to ${moment(lane.ends[span])}`,
      row.panel ? `${row.label}, after the fix` : row.label,
    ];
  }

  showTip(hit, x, y) {
    const [name, length, times, lane] = this.words(hit);
    this.tip.replaceChildren(
      element("strong", {}, name),
      element("span", {}, length),
      element("span", {}, times),
      element("span", { class: "soft" }, lane),
    );
    this.tip.hidden = false;
    const room = this.canvas.parentElement.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(Math.min(x + 12, room), 0)}px`;
    this.tip.style.top = `${y + 14}px`;
  }

  hideTip() {
    this.tip.hidden = true;
  }
}
