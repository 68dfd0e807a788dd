package sandbox_test

import (
	"strings"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func TestADriverIsFoundOrRefusedWithTheReason(t *testing.T) {
	host := []sandbox.DriverStatus{
		{Name: "firecracker", State: sandbox.DriverUnavailable, Reason: "the kernel did not boot", Hint: "use another machine"},
		{Name: "gvisor", State: sandbox.DriverReady, Default: true},
		{Name: "next", State: sandbox.DriverProbing},
		{Name: "mute", State: sandbox.DriverUnavailable},
	}
	for _, c := range []struct {
		name        string
		class       sandbox.Class
		code, needs string
		says, hints string
	}{
		{"", "", "", "", "", ""},
		{"gvisor", "", "", "", "", ""},
		{"firecracker", sandbox.FailedPrecondition, "driver_unavailable", "needs_driver", "the kernel did not boot", "use another machine"},
		{"mute", sandbox.FailedPrecondition, "driver_unavailable", "needs_driver", "mute", "cloche doctor"},
		{"next", sandbox.Unavailable, "driver_probing", "driver_probing", "next", "try again"},
		{"qemu", sandbox.Invalid, "unknown_driver", "needs_driver", "qemu", "gvisor"},
	} {
		d, err := sandbox.FindDriver(host, c.name)
		if c.class == "" {
			if err != nil || d.Name != "gvisor" || sandbox.NeedsDriver(err) != nil {
				t.Errorf("%q: %+v, %v", c.name, d, err)
			}
			continue
		}
		e, n := sandbox.AsError(err), sandbox.AsError(sandbox.NeedsDriver(err))
		if e == nil || e.Class != c.class || e.Code != c.code || !strings.Contains(e.Message, c.says) || !strings.Contains(e.Hint, c.hints) {
			t.Errorf("%q: %+v", c.name, e)
		}
		if n == nil || n.Code != c.needs || !strings.Contains(n.Message, c.says) || !strings.Contains(n.Hint, c.hints) {
			t.Errorf("%q for a snapshot: %+v", c.name, n)
		}
		if probing := c.code == "driver_probing"; probing != e.Retryable || probing != (e.RetryAfter > 0) || probing != n.Retryable {
			t.Errorf("%q: retry %v after %v", c.name, e.Retryable, e.RetryAfter)
		}
	}
}
