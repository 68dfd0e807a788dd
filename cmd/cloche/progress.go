package main

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/term"

	"cloche.dev/cloche/api"
)

// progress shows on standard error what is being done, once that has taken a
// second: a line that changes on a terminal, a line for each step elsewhere.
type progress struct {
	to    *os.File
	tty   bool
	began time.Time
	stop  chan struct{}
	done  chan struct{}

	mu    sync.Mutex
	step  string
	said  string // the step that was printed last, where it is no terminal
	shown bool
}

const patience = time.Second

// begin starts a display; end it by end. With --quiet or --json there is none.
func (a *app) begin(step string) *progress {
	if a.quiet || a.json {
		return nil
	}
	p := &progress{to: a.err, tty: term.IsTerminal(int(a.err.Fd())), began: time.Now(), step: step, stop: make(chan struct{}), done: make(chan struct{})}
	go p.show()
	return p
}

// set changes the step. It does nothing on a nil display.
func (p *progress) set(step string) {
	if p != nil && step != "" {
		p.mu.Lock()
		p.step = line(step)
		p.mu.Unlock()
	}
}

// operation shows an operation's own words.
func (p *progress) operation(what string) func(api.Operation) {
	return func(op api.Operation) {
		step := op.Step
		if op.Delay != nil {
			step = fmt.Sprintf("delayed for %s: %s", span(time.Since(op.Delay.Since)), op.Delay.Reason)
		}
		if step != "" {
			p.set(what + ": " + step)
		}
	}
}

// end takes the display away and waits until it is gone.
func (p *progress) end() {
	if p != nil {
		close(p.stop)
		<-p.done
	}
}

func (p *progress) show() {
	defer close(p.done)
	tick := time.NewTicker(120 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-p.stop:
			if p.shown && p.tty {
				fmt.Fprint(p.to, "\r\x1b[K")
			}
			return
		case <-tick.C:
			if took := time.Since(p.began); took >= patience {
				p.draw(i, took)
			}
		}
	}
}

func (p *progress) draw(i int, took time.Duration) {
	p.mu.Lock()
	step := p.step
	p.mu.Unlock()
	p.shown = true
	if !p.tty {
		if step != p.said {
			p.said = step
			fmt.Fprintf(p.to, "%s …\n", step)
		}
		return
	}
	width, _, err := term.GetSize(int(p.to.Fd()))
	if err != nil || width < 20 {
		width = 80
	}
	text := []rune(fmt.Sprintf("%c %s (%s)", []rune("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")[i%10], step, span(took)))
	fmt.Fprintf(p.to, "\r\x1b[K%s", string(text[:min(len(text), width-1)]))
}
