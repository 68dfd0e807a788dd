package redteam

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
)

// echConfig is an ECHConfigList (RFC 9849, section 4) of a key that nobody has
// any more, for a server with this public name.
func echConfig(public string) []byte {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return nil
	}
	pub := key.PublicKey().Bytes()
	c := []byte{7}                               // config id
	c = binary.BigEndian.AppendUint16(c, 0x0020) // DHKEM(X25519, HKDF-SHA256)
	c = binary.BigEndian.AppendUint16(c, uint16(len(pub)))
	c = append(c, pub...)
	c = append(c, 0, 4, 0, 1, 0, 1)     // HKDF-SHA256, AES-128-GCM
	c = append(c, 0, byte(len(public))) // no maximum length
	c = append(c, public...)
	c = append(c, 0, 0) // no extensions
	list := binary.BigEndian.AppendUint16(nil, uint16(len(c)+4))
	list = binary.BigEndian.AppendUint16(list, 0xfe0d)
	list = binary.BigEndian.AppendUint16(list, uint16(len(c)))
	return append(list, c...)
}
