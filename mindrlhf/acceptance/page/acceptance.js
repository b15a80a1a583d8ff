"use strict";
(() => {
  const input = document.getElementById("filter");
  const count = document.getElementById("count");
  const checks = [...document.querySelectorAll(".check")];
  const show = () => {
    const word = input.value.trim().toLowerCase();
    for (const check of checks) check.hidden = !check.dataset.name.includes(word);
    count.textContent = `${checks.filter((check) => !check.hidden).length} of ${checks.length}`;
  };
  input.addEventListener("input", show);
  show();
})();
