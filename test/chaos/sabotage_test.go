package chaos

import (
	"context"
	"fmt"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
)

// sabotage may kill the machine or the agent of b while a verb is under way. It
// returns a function that waits for that and tells whether a machine was killed.
func (k *worker) sabotage(b *box, fits bool) func() bool {
	none := func() bool { return false }
	if !fits || k.over() {
		return none
	}
	delay := time.Duration(k.rnd.Int64N(int64(1200 * time.Millisecond)))
	switch {
	case k.rnd.IntN(machineKills) == 0:
		done := make(chan bool, 1)
		go func() { // ends within the delay
			time.Sleep(delay)
			done <- k.kill(b)
		}()
		return func() bool { return <-done }
	case b.state == "running" && k.rnd.IntN(agentKills) == 0:
		k.killAgent(b, delay/2)
	}
	return none
}

// kill kills the machine of b if it has one now.
func (k *worker) kill(b *box) bool {
	pid := harness.KillSentry(b.id)
	if pid == 0 {
		return false
	}
	b.killed = pid
	b.note("machine %d killed", pid)
	k.rep.count("kills", "machine")
	k.kills.Add(1)
	return true
}

// killMachine kills a running machine while nothing is asked of it.
func (k *worker) killMachine(b *box) error {
	if k.rnd.IntN(2) == 0 {
		k.killAgent(b, 0)
		return k.checkRunning(b)
	}
	if !k.kill(b) {
		return fmt.Errorf("it runs and has no machine on the host")
	}
	if err := k.aftermath(b, true); err != nil {
		return err
	}
	return k.checkKept(b)
}

// aftermath compares the row with the model after something may have ended the
// machine: then the row says so soon, and the model crashes too.
func (k *worker) aftermath(b *box, disturbed bool) error {
	if !disturbed || !hasMachine(b.state) {
		b.killed = 0
		return k.settled(b)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		s, err := k.row(b.id)
		if err != nil {
			return err
		}
		pid := harness.Sentry(b.id)
		if string(s.State) == "failed" {
			if gaveUp := b.gaveUp && s.End != nil && s.End.Reason == "rolled_back"; !gaveUp && b.killed == 0 || pid != 0 {
				return fmt.Errorf("the sandbox has failed by itself: %+v (machine on the host: %d, killed: %d)", s.End, pid, b.killed)
			}
			break
		}
		if !b.gaveUp && b.killed == 0 || pid != 0 && pid != b.killed {
			b.killed, b.gaveUp = 0, false
			return k.settled(b)
		}
		if time.Now().After(end) {
			return fmt.Errorf("its machine was killed a minute ago, and it is %s", s.State)
		}
	}
	b.killed, b.gaveUp = 0, false
	b.crash()
	k.rep.count("checks", "a killed machine is told of")
	return k.settled(b)
}

// killingAgent waits and then kills the agent, as root inside can do.
const killingAgent = `
import os, sys, time
time.sleep(float(sys.argv[1]))
for p in os.listdir('/proc'):
    if p.isdigit():
        try:
            a = open('/proc/%s/cmdline' % p, 'rb').read().split(b'\0')
        except OSError:
            continue
        if len(a) > 1 and a[0].endswith(b'guest') and a[1] == b'agent':
            os.kill(int(p), 9)
`

// killAgent starts a command inside that kills the agent after a while.
func (k *worker) killAgent(b *box, after time.Duration) {
	m := k.mark()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	args := []string{"python3", "-c", killingAgent, fmt.Sprintf("%.3f", after.Seconds())}
	s, err := k.c.CreateSession(ctx, b.id, api.ProcessSpec{Args: args, User: "root"})
	if err != nil {
		k.rep.wrong("worker %d: create a session in %s: %v", k.n, b.id, err)
		return
	}
	b.other[s.ID] = true
	if _, err := k.c.Session(b.id, s.ID).Start(ctx); err != nil {
		if strings.Contains(k.since(m), "clock") {
			return // it may have expired
		}
		k.rep.wrong("worker %d: start a session in %s: %v", k.n, b.id, err)
		return
	}
	k.rep.count("kills", "agent")
	k.kills.Add(1)
	k.troubles.agent.Add(1)
}
