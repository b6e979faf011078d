"use strict";
// A browser starts no worker for a page that was opened from disk, and the search wants one.
// Here the worker's script runs in a hidden frame instead. Over HTTP nothing is replaced.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (source) => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${source} did not load`));
        script.src = source;
        inside.document.head.append(script);
      });
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const loaded = load(new URL(url, document.baseURI).href);
      this.postMessage = (data) => {
        loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
      };
      this.terminate = () => frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
