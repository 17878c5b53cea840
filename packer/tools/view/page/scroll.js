// Scrolling over more pixels than the largest height of an element. A spacer of at most LONGEST pixels makes the scroll
// bar; `top` is the real position. Small movements of the bar move `top` pixel by pixel; jumps are shares of the whole.

const LONGEST = 4_000_000; // browsers limit the height of an element; the lowest known limit is 8,947,840 pixels

export class Scroll {
  top = 0;
  #element;
  #spacer;
  #height = 0;
  #last = 0;

  /** moved: called after `top` has changed by the user's scrolling. */
  constructor(element, spacer, moved) {
    this.#element = element;
    this.#spacer = spacer;
    element.addEventListener("scroll", () => {
      if (this.#read()) moved();
    }, { passive: true });
    element.addEventListener("scrollend", () => this.#align());
  }

  get most() {
    return Math.max(0, this.#height - this.#element.clientHeight);
  }

  get #room() {
    return Math.max(0, Math.min(this.#height, LONGEST) - this.#element.clientHeight);
  }

  resize(height) {
    this.#height = height;
    this.#spacer.style.height = `${Math.min(height, LONGEST)}px`;
    this.to(this.top);
  }

  to(top) {
    this.top = Math.min(Math.max(top, 0), this.most);
    this.#align();
  }

  /** The offset of a child element that is visible at position `y`. */
  offset(y) {
    return y - this.top + this.#element.scrollTop;
  }

  #align() {
    const place = this.#room === this.most ? this.top : (this.top / this.most) * this.#room;
    if (Math.abs(place - this.#element.scrollTop) >= 1) this.#element.scrollTop = place;
    this.#last = this.#element.scrollTop;
  }

  #read() {
    const now = this.#element.scrollTop, moved = now - this.#last, page = this.#element.clientHeight;
    if (!moved) return false;
    this.#last = now;
    if (this.#room === this.most) this.top = now;
    else if (Math.abs(moved) > 4 * page) this.top = (now / this.#room) * this.most;
    else this.top = Math.min(Math.max(this.top + moved, 0), this.most);
    const isAtEdge = now < page || now > this.#room - page; // the bar must not end before the samples
    if (this.#room !== this.most && isAtEdge) this.#align();
    return true;
  }
}
