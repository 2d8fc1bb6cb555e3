// A page of a stranger asks the server at this port, in every way a browser has; what it got.
async ([port, path]) => {
  const got = [], own = location.port == port, url = own ? "" : `http://127.0.0.1:${port}`;
  const take = async (name, wait) => {
    try { const text = await wait; if (text) got.push([name, text]); } catch (error) {}
  };
  for (const one of [path, "/health", "/metadata", "/v1/models"])
    for (const mode of ["cors", "no-cors"])
      for (const method of ["GET", "POST"])
        await take(`${mode} ${method} ${one}`, fetch(url + one, {mode, method,
          ...(method == "POST" && {body: "{}", headers: {"Content-Type": "text/plain"}})})
          .then(async (reply) => reply.ok ? await reply.text() || "opaque" : ""));
  for (const one of ["/ws", "/mcp"])
    await take(`socket ${one}`, new Promise((resolve) => {
      const socket = new WebSocket(`ws://127.0.0.1:${port}${one}`);
      socket.onopen = () => resolve("open");
      socket.onerror = () => resolve("");
    }));
  await take("script", new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = url + path;
    script.onload = () => resolve("loaded");
    script.onerror = () => resolve("");
    document.head.append(script);
  }));
  return got;
}
