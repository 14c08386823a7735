// Browsers start no workers from files: where pages are opened from a folder, the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const bridge = `
        window.postMessage = (data) => frameElement.worker.dispatchEvent(new MessageEvent("message", { data }));
        window.importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise((resolve) => {
          const script = document.createElement("script");
          script.onload = resolve;
          script.src = url;
          document.body.append(script);
        })), Promise.resolve());`;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.worker = this;
      this.frame.srcdoc = `<body><script>${bridge}<\/script><script src="${url}"><\/script></body>`;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      document.documentElement.append(this.frame);
    }
    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
