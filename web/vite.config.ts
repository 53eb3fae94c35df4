// One script and one style sheet, with relative addresses: the server mounts them anywhere and the report inlines them.
import { defineConfig } from "vite";

export default defineConfig({
  base: "./",
  build: {
    outDir: "../src/tensortap/view/static",
    emptyOutDir: true,
    target: "es2022",
    cssCodeSplit: false,
    modulePreload: false,
    assetsInlineLimit: 100_000,
    rollupOptions: { output: { inlineDynamicImports: true } },
  },
  server: { proxy: { "/api": "http://127.0.0.1:6160" } },
});
