//go:build !clocheweak

package proxy

// decideWeakly decides nothing: this is not a weakened build.
func (g *guest) decideWeakly(*Live) bool { return false }

// decideWeakly decides nothing, as above.
func (x *exchange) decideWeakly(string) bool { return false }
