const form = document.getElementById("log-in");
const problem = document.getElementById("problem");
const key = document.getElementById("key");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  problem.textContent = "";
  try {
    const response = await fetch("/kvtier/v1/session", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ key: key.value }),
    });
    if (response.ok) {
      location.reload();
      return;
    }
    const found = await response.json().catch(() => ({}));
    problem.textContent = (found.error && found.error.message) || `the server answered ${response.status}`;
  } catch {
    problem.textContent = "the server does not answer";
  }
  button.disabled = false;
  key.select();
});
