// A webhook as one written in Go would be: what vc-manager's is compared with in tests/cluster/load.sh. It decodes a
// ClusterVersion into the types of the Go manager, sets the update strategy of each embedded StatefulSet to
// RollingUpdate, and answers with the difference, all with controller-runtime's own means.
//
// Usage: webhook-go PORT CERTIFICATE-FOLDER
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/manager/signals"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

type bundle struct {
	metav1.ObjectMeta `json:"metadata,omitempty"`
	StatefulSet       *appsv1.StatefulSet `json:"statefulset,omitempty"`
	Service           *corev1.Service     `json:"service,omitempty"`
}

type clusterVersion struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              struct {
		APIServer         *bundle `json:"apiServer,omitempty"`
		ControllerManager *bundle `json:"controllerManager,omitempty"`
		ETCD              *bundle `json:"etcd,omitempty"`
	} `json:"spec,omitempty"`
	Status struct{} `json:"status,omitempty"`
}

// Needed to be decoded only, which copies nothing.
func (c *clusterVersion) DeepCopyObject() runtime.Object { panic("never copied") }

type mutator struct{ decoder admission.Decoder }

func (m *mutator) Handle(_ context.Context, request admission.Request) admission.Response {
	version := &clusterVersion{}
	if err := m.decoder.Decode(request, version); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	for _, b := range []*bundle{version.Spec.ETCD, version.Spec.APIServer, version.Spec.ControllerManager} {
		if b != nil && b.StatefulSet != nil {
			b.StatefulSet.Spec.UpdateStrategy.Type = appsv1.RollingUpdateStatefulSetStrategyType
		}
	}
	changed, err := json.Marshal(version)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	return admission.PatchResponseFromRaw(request.Object.Raw, changed)
}

func run() error {
	if len(os.Args) != 3 {
		return fmt.Errorf("usage: webhook-go PORT CERTIFICATE-FOLDER")
	}
	port, err := strconv.Atoi(os.Args[1])
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	version := schema.GroupVersion{Group: "tenancy.x-k8s.io", Version: "v1alpha1"}
	scheme.AddKnownTypeWithName(version.WithKind("ClusterVersion"), &clusterVersion{})
	server := webhook.NewServer(webhook.Options{Host: "127.0.0.1", Port: port, CertDir: os.Args[2]})
	server.Register("/mutate-tenancy-x-k8s-io-v1alpha1-clusterversion",
		&webhook.Admission{Handler: &mutator{decoder: admission.NewDecoder(scheme)}})
	return server.Start(signals.SetupSignalHandler())
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
