// Where everything stands on the canvas, from top to bottom. Pixels of the page, not of the screen.

const OVERVIEW_TOP = 4;
const OVERVIEW_HEIGHT = 12;
const AXIS_HEIGHT = 42;
const HEAD_HEIGHT = 30;
const FLAG_HEIGHT = 17;
const PANEL_GAP = 14;
const GROUP_GAP = 6;
const BOTTOM = 8;

/** Lanes of one or two timelines one above the other: a panel for each timeline, a row for each lane. */
class Rows {
  /** `flagged`: the lanes that marks point at, which need room for labels in the first panel. */
  constructor(labels, numPanels, flagged) {
    const rowHeight = labels.length <= 16 ? 24 : labels.length <= 48 ? 16 : 10;
    this.panels = [];
    this.rows = [];
    let top = AXIS_HEIGHT;
    for (let panel = 0; panel < numPanels; panel++) {
      const head = top;
      top += HEAD_HEIGHT;
      labels.forEach((label, lane) => {
        const isNewGroup = lane > 0 && group(label) !== group(labels[lane - 1]);
        if (isNewGroup) top += GROUP_GAP;
        const flagTop = top;
        if (panel === 0 && flagged.has(lane)) top += FLAG_HEIGHT;
        this.rows.push({ panel, lane, label, isNewGroup, flagTop, top, height: rowHeight - 2 });
        top += rowHeight;
      });
      this.panels.push({ top: head, rowsTop: head + HEAD_HEIGHT, bottom: top });
      top += PANEL_GAP;
    }
    this.height = top - PANEL_GAP + BOTTOM;
  }

  /** The row at this height, or undefined. */
  at(y) {
    return this.rows.find((row) => y >= row.flagTop && y < row.top + row.height + 1);
  }
}

function group(label) {
  return label.split(" · ")[0];
}

/** Marks of one lane as they are drawn: those that touch on the screen are one, which says how many it stands for. */
function joinedMarks(marks, lane, pixelUs) {
  const joined = [];
  for (const [onLane, startUs, endUs, label] of marks) {
    if (onLane !== lane) continue;
    const last = joined[joined.length - 1];
    if (last && startUs - last.endUs < 3 * pixelUs && (endUs - startUs < 8 * pixelUs || startUs < last.endUs)) {
      last.endUs = Math.max(last.endUs, endUs);
      last.count++;
    } else {
      joined.push({ lane, startUs, endUs, label, count: 1 });
    }
  }
  return joined;
}
