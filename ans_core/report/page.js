// Shows the pictures that the form asks for; without JavaScript all of them are shown.
const form = document.getElementById("filters");
const figures = [...document.querySelectorAll(".gallery figure")];

function asked(figure, { row, benchmark, show }) {
  const { dataset } = figure;
  return (!row || dataset.row === row)
    && (!benchmark || dataset.benchmark === benchmark)
    && (!show || (show === "changed" ? dataset.changed !== "" : dataset.verdict === show));
}

function apply() {
  const wanted = Object.fromEntries(new FormData(form));
  for (const figure of figures) figure.hidden = !asked(figure, wanted);
  const shown = figures.filter((figure) => !figure.hidden).length;
  form.querySelector("output").textContent = `${shown} of ${figures.length} pictures`;
  document.getElementById("none").hidden = shown > 0;
}

form.addEventListener("input", apply);
form.addEventListener("submit", (event) => event.preventDefault());
form.hidden = figures.length === 0;
apply();
