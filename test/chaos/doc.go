// Package chaos kills Cloche while it works, and checks every answer against a
// model that knows nothing of its code. `make chaos` runs it; what it does and
// how to read what it prints is in docs/chaos.md.
package chaos
