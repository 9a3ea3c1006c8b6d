// Images that go with the next message: dropped on the form, pasted, or chosen.

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

export class Attachments {
  // form: where images are dropped. input: the file chooser. list: shows a button for each image, which removes it.
  constructor(form, input, list, complain) {
    this.urls = new Map(); // button -> data URL
    this.list = list;
    this.complain = complain;
    input.addEventListener("change", async () => {
      await this.add(input.files);
      input.value = "";
    });
    form.addEventListener("paste", (event) => {
      if (event.clipboardData.files.length) {
        event.preventDefault();
        this.add(event.clipboardData.files);
      }
    });
    for (const kind of ["dragover", "dragleave", "drop"]) {
      form.addEventListener(kind, (event) => {
        event.preventDefault();
        form.classList.toggle("over", kind === "dragover");
        if (kind === "drop") this.add(event.dataTransfer.files);
      });
    }
  }

  async add(files) {
    for (const file of files) {
      try {
        if (!TYPES.includes(file.type)) throw new Error(`${file.name} is no PNG, JPEG, WebP or GIF`);
        const url = await dataUrl(file);
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = `${file.name || "image"} ×`;
        button.title = "Remove";
        button.addEventListener("click", () => {
          this.urls.delete(button);
          button.remove();
        });
        this.urls.set(button, url);
        this.list.append(button);
      } catch (error) {
        this.complain(error.message);
      }
    }
  }

  // What is said with the images, as the content of a message, and their names.
  content(text) {
    const [urls, names] = [[...this.urls.values()], [...this.urls.keys()].map((b) => b.textContent.slice(0, -2))];
    if (!urls.length) return { content: text, names };
    const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
    return { content: [{ type: "text", text }, ...parts], names };
  }

  // They are sent.
  clear() {
    this.urls.clear();
    this.list.replaceChildren();
  }
}
