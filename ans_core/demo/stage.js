// The picture: a click, a dragged box or a brush stroke on it becomes the event `select` with {kind, points}, in pixels of the picture.
let points = [];
const svg = () => element.querySelector("svg");
const kind = () => document.querySelector("#prompt-kind input:checked")?.value ?? "click";

function place(event) {
  const box = svg().getBoundingClientRect();
  const { width, height } = svg().viewBox.baseVal;
  const inside = (value, most) => Math.min(Math.max(value, 0), most);
  return [
    inside(((event.clientX - box.left) / box.width) * width, width),
    inside(((event.clientY - box.top) / box.height) * height, height),
  ];
}

function draw() {
  const [[x1, y1], [x2, y2]] = [points[0], points[points.length - 1]];
  if (kind() === "brush") {
    svg().querySelector("polyline").setAttribute("points", points.map((point) => point.join(",")).join(" "));
  } else if (kind() === "box") {
    const values = { x: Math.min(x1, x2), y: Math.min(y1, y2), width: Math.abs(x2 - x1), height: Math.abs(y2 - y1) };
    Object.entries(values).forEach(([name, value]) => svg().querySelector("rect").setAttribute(name, value));
  }
}

element.addEventListener("pointerdown", (event) => {
  if (!event.target.closest("svg") || event.button !== 0) return;
  event.preventDefault();
  svg().setPointerCapture(event.pointerId);
  points = [place(event)];
});
element.addEventListener("pointermove", (event) => {
  if (!points.length) return;
  points.push(place(event));
  draw();
});
element.addEventListener("pointercancel", () => (points = []));
element.addEventListener("pointerup", (event) => {
  if (!points.length) return;
  points.push(place(event));
  trigger("select", { kind: kind(), points });
  points = [];
});
