// What mouse, pen and finger do on the canvas.

/** Wheel: zoom around the cursor, pan with Shift. Drag: pan; in the overview, jump. Resting: a tooltip. Double click: zoom to a span. */
function listenToPointer(stage) {
  const { canvas, view, painter } = stage;
  let drag = null;

  canvas.addEventListener("wheel", (event) => {
    const px = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? innerHeight : 1;
    const isPan = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!isPan && event.deltaY > 0 && view.isWhole) return; // nothing to zoom out of: the page may scroll
    event.preventDefault();
    if (isPan) stage.pan(((event.deltaX || event.deltaY) * px) / (painter.right - painter.left));
    else stage.zoom(Math.exp(event.deltaY * px * (event.ctrlKey ? 0.01 : 0.0018)), painter.timeAt(event.offsetX));
  }, { passive: false });

  const jump = (x) => {
    const share = (x - painter.left) / (painter.right - painter.left);
    const middleUs = view.wholeStartUs + share * (view.wholeEndUs - view.wholeStartUs);
    view.set(middleUs - view.lengthUs / 2, middleUs + view.lengthUs / 2);
    stage.ask();
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x: event.offsetX, isJump: event.offsetY < OVERVIEW_TOP + OVERVIEW_HEIGHT + 4 };
    if (drag.isJump) jump(event.offsetX);
    else canvas.classList.add("dragged");
    stage.hideTip();
  });

  canvas.addEventListener("pointermove", (event) => {
    if (drag && drag.isJump) {
      jump(event.offsetX);
    } else if (drag) {
      stage.pan((drag.x - event.offsetX) / (painter.right - painter.left));
      drag.x = event.offsetX;
    } else {
      const hit = stage.hit(event.offsetX, event.offsetY);
      if (hit && hit.span >= 0) stage.showTip(hit, event.offsetX, event.offsetY);
      else stage.hideTip();
    }
  });

  for (const kind of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(kind, () => {
      drag = null;
      canvas.classList.remove("dragged");
    });
  }
  canvas.addEventListener("pointerleave", () => stage.hideTip());
  canvas.addEventListener("dblclick", (event) => {
    const hit = stage.hit(event.offsetX, event.offsetY);
    if (hit) stage.goToSpan(hit);
  });
}
