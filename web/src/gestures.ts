// What a mouse does over a canvas: moves, brushes over a stretch, clicks, double clicks.

const DRAG = 5; // pixels that make a brush of a click
const DOUBLE = 230; // milliseconds in which a second click may follow

export interface Stretch {
  from: number;
  to: number;
}

export interface Gestured {
  moved(x: number, y: number): void;
  left(): void;
  clicked(x: number, y: number): void;
  brushed(stretch: Stretch): void;
  reset(): void;
}

export class Gestures {
  private pressed: Stretch | null = null;
  private timer = 0;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly on: Gestured,
  ) {
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => on.left());
    canvas.addEventListener("dblclick", () => this.twice());
  }

  /** The stretch that is being brushed over, once it is one. */
  get brush(): Stretch | null {
    const { pressed } = this;
    if (!pressed || Math.abs(pressed.to - pressed.from) < DRAG) return null;
    return { from: Math.min(pressed.from, pressed.to), to: Math.max(pressed.from, pressed.to) };
  }

  close(): void {
    clearTimeout(this.timer);
  }

  private press(event: PointerEvent): void {
    if (event.button !== 0) return;
    this.pressed = { from: event.offsetX, to: event.offsetX };
    this.canvas.setPointerCapture(event.pointerId);
  }

  private move(event: PointerEvent): void {
    if (this.pressed) this.pressed.to = event.offsetX;
    this.on.moved(event.offsetX, event.offsetY);
  }

  private release(event: PointerEvent): void {
    const { brush, pressed } = this;
    this.pressed = null;
    if (brush) this.on.brushed(brush);
    else if (pressed) this.click(event.offsetX, event.offsetY);
  }

  /** A click counts, unless it turns out to be the first half of a double click. */
  private click(x: number, y: number): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.on.clicked(x, y), DOUBLE);
  }

  private twice(): void {
    clearTimeout(this.timer);
    this.on.reset();
  }
}
