// What scrolls can be reached by the keyboard: boxes of code and of wide tables.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll("pre > code, .md-typeset__table, .md-typeset__scrollwrap")) {
    box.tabIndex = 0;
  }
});
