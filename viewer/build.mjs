// Builds the page into the Python package: one script, one style sheet, one page.
//   node build.mjs [OUT]
import { build } from "esbuild";
import { copyFileSync, mkdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..", "lab", "viewing", "static");

mkdirSync(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { viewer: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "utf8",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "inline",
  logLevel: "warning",
});
copyFileSync(join(here, "index.html"), join(out, "index.html"));
