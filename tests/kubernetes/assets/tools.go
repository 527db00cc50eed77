//go:build tools

// Package assets pins the servers that the tests run against: a real
// kube-apiserver, its controller manager, kubectl, and etcd. It is never
// compiled; it keeps their import paths in go.mod, so that `go mod tidy`
// does not drop them. ../build.py builds the binaries.
package assets

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
