// What scrolls can be reached by the keyboard, and what has a role has a name: the search, the buttons beside a block of code.
function improve() {
  for (const box of document.querySelectorAll("pre > code, .md-typeset__table, .md-typeset__scrollwrap")) {
    box.tabIndex = 0;
  }
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((buttons, number) => {
    buttons.setAttribute("aria-label", `Code block ${number + 1}`);
  });
}
document.addEventListener("DOMContentLoaded", () => {
  improve();
  // the buttons come when the theme has seen the blocks
  new MutationObserver(improve).observe(document.body, { childList: true, subtree: true });
});
