// What is typed into the filter box, as the pattern the server understands; and the same patterns for a report, which
// has no server. The words are those of tt.probe (docs/triggers-and-sites.md).

import type { SiteInfo } from "./types.ts";

const PORT = /^(.*):([\w*?{},]+)((?:\.[^.[\]:]+|\[[^\]]*\])*)$/s;
const PREFIX = /^(type|re|op):/;

/** A plain word finds every site whose path holds it; a pattern without a port means every port. */
export function asked(text: string, sites: readonly SiteInfo[]): string {
  const word = text.trim();
  if (!word) return "";
  if (sites.some((site) => site.site === word)) return word;
  if (/^[\w.-]+$/.test(word) && !sites.some((site) => site.path === word))
    return `re:.*${word.replace(/\./g, "\\.")}.*:*`;
  return hasPort(word) ? word : `${word}:*`;
}

function hasPort(word: string): boolean {
  const rest = word.replace(PREFIX, "");
  return PORT.test(rest);
}

/** Whether a site is meant. Throws what a regular expression throws when it cannot be read. */
export function matcher(pattern: string): (site: SiteInfo) => boolean {
  const prefix = PREFIX.exec(pattern)?.[1] ?? "";
  const rest = prefix ? pattern.slice(prefix.length + 1) : pattern;
  const [, path, port, slot] = PORT.exec(rest) ?? [undefined, rest, "output", ""];
  const ports = whole(glob(port ?? "output", "[^]*"));
  const finds = finder(prefix, path ?? "");
  return (site) => ports.test(site.port) && site.slot.startsWith(slot ?? "") && finds(site);
}

function finder(prefix: string, path: string): (site: SiteInfo) => boolean {
  if (prefix === "re") return tested(new RegExp(`^(?:${path})$`, "s"), (site) => site.path);
  if (prefix === "type") return tested(whole(glob(path, "[^]*")), (site) => site.type);
  if (prefix === "op") return tested(whole(glob(path, "[^]*")), (site) => site.op);
  const regex =
    path === "**"
      ? /^[^]*$/
      : whole(
          glob(path, "[^./]*")
            .replace(/\\\.\x00$/, "(?:[./][^]*)?")
            .replace(/\x00/g, "[^]*"),
        );
  return tested(regex, (site) => site.path);
}

function tested(regex: RegExp, part: (site: SiteInfo) => string): (site: SiteInfo) => boolean {
  return (site) => regex.test(part(site));
}

function whole(source: string): RegExp {
  return new RegExp(`^(?:${source})$`, "s");
}

/** `**` stays as a mark (NUL), since what it means depends on where it stands. */
function glob(text: string, star: string): string {
  const escaped = text.replace(/[.+^$()|[\]\\/]/g, "\\$&").replace(/\?/g, "[^./]");
  const braces = escaped.replace(/\{([^{}]*)\}/g, (_, inner: string) => `(?:${inner.split(",").join("|")})`);
  return braces.replace(/\*\*/g, "\x00").replace(/\*/g, star);
}
