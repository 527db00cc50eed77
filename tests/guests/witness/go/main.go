// Says in its log what an image must not repeat: random names, the clock, the configuration as it is now.
//
//go:debug randseednop=0
package main

import (
	crypto "crypto/rand"
	"encoding/json"
	"fmt"
	"math/rand"
	"time"

	torpor "torpor.dev/sdk/go"
)

// Used before the image is taken, as libraries do in their init functions.
var (
	started = time.Now()
	early   = rand.Int63()
)

func init() {
	torpor.Register(torpor.Operator{
		Manifest:  `{"for": {"resource": "example.com/v1/widgets"}, "sdk": "go/0.1.0"}`,
		Reconcile: reconcile,
	})
}

func main() { _ = early }

func reconcile(torpor.Request) (torpor.Result, error) {
	settings, err := torpor.Config()
	if err != nil {
		return torpor.Result{}, err
	}
	var bytes [8]byte
	if _, err := crypto.Read(bytes[:]); err != nil {
		return torpor.Result{}, err
	}
	line, err := json.Marshal(map[string]any{
		"names": map[string]string{
			"crypto/rand": fmt.Sprintf("%x", bytes), "math/rand": fmt.Sprintf("%x", rand.Int63()),
		},
		"monotonic_ns": time.Since(started).Nanoseconds(),
		"settings":     json.RawMessage(settings),
	})
	if err != nil {
		return torpor.Result{}, err
	}
	torpor.Log(torpor.Info, string(line))
	return torpor.Result{}, nil
}
