// Requests to the router. The key stays in this tab; nothing is sent to another host.

const KEY = "tandem-api-key";
const SECONDS = 10;

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request with the key. Throws Refused, with the server's sentence, if the answer is an error. */
export async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const answer = await fetch(path, { signal: AbortSignal.timeout(SECONDS * 1000), ...options, headers });
  if (!answer.ok) throw new Refused(answer.status, await problem(answer));
  return answer;
}

async function problem(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

/** Yield the data of the server-sent events of an answer, without the last "[DONE]". */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
    }
  }
}
