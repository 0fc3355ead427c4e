// Shows the pictures that the form asks for, and a picture at its full size; without JavaScript all pictures are shown.
const form = document.getElementById("filters");
const figures = [...document.querySelectorAll(".gallery figure")];
const large = document.getElementById("large");

function asked(figure, { row, benchmark, show }) {
  const { dataset } = figure;
  return (!row || dataset.row === row)
    && (!benchmark || dataset.benchmark === benchmark)
    && (!show || dataset.verdict === show || dataset.changed === show || (show === "changed" && dataset.changed !== ""));
}

function apply() {
  const wanted = Object.fromEntries(new FormData(form));
  for (const figure of figures) figure.hidden = !asked(figure, wanted);
  const shown = figures.filter((figure) => !figure.hidden).length;
  form.querySelector("output").textContent = `${shown} of ${figures.length} pictures`;
  document.getElementById("none").hidden = shown > 0;
}

for (const figure of figures) {
  figure.querySelector(".open")?.addEventListener("click", () => {
    large.querySelector(".scroll").replaceChildren(...[...figure.querySelector(".open").children].map((one) => one.cloneNode(true)));
    large.showModal();
  });
}

large.addEventListener("click", (event) => event.target === large && large.close());
form.addEventListener("input", apply);
form.addEventListener("submit", (event) => event.preventDefault());
form.hidden = figures.length === 0;
apply();
