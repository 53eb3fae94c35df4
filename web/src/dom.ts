// Elements, made from names and text. Text is always text: nothing that comes from a run is ever parsed as HTML.

type Child = Node | string | number | null | undefined | false;
type Value = string | number | boolean | null | undefined | ((event: never) => void);

/** `h("a", { href: "#", class: "x", onclick: f }, "text", child)` */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, Value> = {},
  ...children: (Child | Child[])[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) put(element, name, value);
  element.append(...nodes(children));
  return element;
}

function put(element: HTMLElement, name: string, value: Value): void {
  if (value === null || value === undefined || value === false) return;
  if (typeof value === "function") element.addEventListener(name.slice(2), value as EventListener);
  else element.setAttribute(name, value === true ? "" : String(value));
}

function nodes(children: (Child | Child[])[]): (Node | string)[] {
  const flat = children.flat().filter((child) => child !== null && child !== undefined && child !== false);
  return flat.map((child) => (child instanceof Node ? child : String(child)));
}

export function fill(element: Element, ...children: (Child | Child[])[]): void {
  element.replaceChildren(...nodes(children));
}

/** A select whose options are values, or pairs of a value and its label. */
export function select(
  label: string,
  options: readonly (string | readonly [string, string])[],
  chosen: string,
  change: (value: string) => void,
): HTMLSelectElement {
  const pairs = options.map((option) => (typeof option === "string" ? ([option, option] as const) : option));
  const items = pairs.map(([value, text]) => h("option", { value, selected: value === chosen }, text));
  const element = h("select", { "aria-label": label, title: label }, items);
  element.addEventListener("change", () => change(element.value));
  return element;
}

/** A function that runs at most once a frame, with the latest call. */
export function framed(run: () => void): () => void {
  let waiting = 0;
  return () => {
    waiting ||= requestAnimationFrame(() => {
      waiting = 0;
      run();
    });
  };
}

/** Calls back with the size of an element, now and whenever it changes. */
export function sized(element: Element, changed: (width: number, height: number) => void): () => void {
  const observer = new ResizeObserver(([entry]) => {
    if (entry) changed(entry.contentRect.width, entry.contentRect.height);
  });
  observer.observe(element);
  return () => observer.disconnect();
}
