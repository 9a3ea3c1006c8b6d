// Requests to the server that this page came from, with the key that the person typed.

const keyBox = document.getElementById("key");
keyBox.value = sessionStorage.getItem("key") ?? "";
keyBox.addEventListener("change", () => sessionStorage.setItem("key", keyBox.value));

export function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (keyBox.value) headers.authorization = `Bearer ${keyBox.value}`;
  return fetch(new URL(path, document.baseURI), { ...options, headers });
}

// The data of each server-sent event of a response, as it comes.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}
