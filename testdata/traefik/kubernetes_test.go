package traefik_test

import (
	"bufio"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/traefik/traefik/v3/pkg/config/dynamic"
	"github.com/traefik/traefik/v3/pkg/provider/kubernetes/crd"
	traefikscheme "github.com/traefik/traefik/v3/pkg/provider/kubernetes/crd/generated/clientset/versioned/scheme"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

// readKubernetes reads manifests as a cluster does that refuses unknown fields, and the resources as Traefik's provider does.
func readKubernetes(t *testing.T, e example) (contents, error) {
	t.Helper()
	own, err := objectsIn(e.text)
	if err != nil {
		return contents{}, err
	}
	// The files of a folder are applied together.
	all := e.text
	for _, sibling := range e.siblings {
		if format, err := sibling.format(); err == nil && format.name == "Kubernetes" {
			all += "\n---\n" + sibling.text
		}
	}

	return readObjects(t, own, all)
}

// readObjects returns the contents of some of the manifests that are applied together.
func readObjects(t *testing.T, own []runtime.Object, all string) (contents, error) {
	t.Helper()
	read := contents{images: imagesOf(own)}
	if !hasMiddleware(own) {
		return read, nil
	}
	objects, err := objectsIn(all)
	if err != nil {
		return contents{}, err
	}
	configuration, err := provideObjects(t, objects)
	if err != nil {
		return contents{}, err
	}
	if read.middlewares, err = tapsOf(configuration, crd.ProviderName); err != nil {
		return contents{}, err
	}
	read.shown, err = showManifests(all)

	return read, err
}

func hasMiddleware(objects []runtime.Object) bool {
	for _, object := range objects {
		if object.GetObjectKind().GroupVersionKind().Kind == "Middleware" {
			return true
		}
	}

	return false
}

// objectsIn decodes manifests. An unknown kind or field is an error.
func objectsIn(text string) ([]runtime.Object, error) {
	known := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(known), traefikscheme.AddToScheme(known)); err != nil {
		return nil, err
	}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, known, known, json.SerializerOptions{Yaml: true, Strict: true})
	reader := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))

	var objects []runtime.Object
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		if len(strings.TrimSpace(string(document))) == 0 {
			continue
		}
		object, kind, err := decoder.Decode(document, nil, nil)
		if err != nil {
			return nil, err
		}
		object.GetObjectKind().SetGroupVersionKind(*kind)
		objects = append(objects, object)
	}
}

// provideObjects starts Traefik's provider in front of what looks like a cluster with these objects, and returns the
// configuration that it makes of them.
func provideObjects(t *testing.T, objects []runtime.Object) (*dynamic.Configuration, error) {
	t.Helper()
	found, err := newCluster(objects)
	if err != nil {
		return nil, err
	}
	server := httptest.NewServer(found)
	defer server.Close()
	defer server.CloseClientConnections() // Watches end with the provider, but their connections are kept.
	safeNaming := false
	provider := &crd.Provider{Endpoint: server.URL, SafeNaming: &safeNaming}
	require.NoError(t, provider.Init())

	return provide(t, provider.Provide)
}

// cluster is an API server that has objects by the names of their resources, and in which nothing happens.
type cluster map[string][]runtime.Object

func newCluster(objects []runtime.Object) (cluster, error) {
	found := cluster{}
	for _, object := range objects {
		resource, _ := meta.UnsafeGuessKindToResource(object.GetObjectKind().GroupVersionKind())
		accessor, err := meta.Accessor(object)
		if err != nil {
			return nil, err
		}
		if accessor.GetNamespace() == "" {
			accessor.SetNamespace(metav1.NamespaceDefault)
		}
		found[resource.Resource] = append(found[resource.Resource], object)
		switch object := object.(type) {
		case *corev1.Service:
			found["endpointslices"] = append(found["endpointslices"], endpointsOf(object))
		case *corev1.Secret:
			// A cluster answers with data alone.
			for key, text := range object.StringData {
				if object.Data == nil {
					object.Data = map[string][]byte{}
				}
				object.Data[key] = []byte(text)
			}
			object.StringData = nil
		}
	}

	return found, nil
}

// endpointsOf is what a cluster finds for a service that has one pod.
func endpointsOf(service *corev1.Service) *discoveryv1.EndpointSlice {
	ready := true
	endpoints := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: service.Name, Namespace: service.Namespace, Labels: map[string]string{discoveryv1.LabelServiceName: service.Name},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
	for _, port := range service.Spec.Ports {
		endpoints.Ports = append(endpoints.Ports, discoveryv1.EndpointPort{Name: &port.Name, Port: &port.Port})
	}

	return endpoints
}

func (c cluster) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	if req.URL.Query().Has("watch") {
		rw.Header().Set("Content-Type", "application/json")
		_ = http.NewResponseController(rw).Flush()
		<-req.Context().Done()

		return
	}
	answerJSON(func(req *http.Request) any {
		return map[string]any{"metadata": metav1.ListMeta{ResourceVersion: "1"}, "items": c[path.Base(req.URL.Path)]}
	})(rw, req)
}

// imagesOf returns the images of all containers.
func imagesOf(objects []runtime.Object) []string {
	var images []string
	for _, object := range objects {
		plain, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
		if err == nil {
			images = append(images, imagesBelow(plain)...)
		}
	}

	return images
}

func imagesBelow(value any) []string {
	var images []string
	switch value := value.(type) {
	case map[string]any:
		for name, inner := range value {
			if image, ok := inner.(string); ok && name == "image" {
				images = append(images, image)
			}
			images = append(images, imagesBelow(inner)...)
		}
	case []any:
		for _, inner := range value {
			images = append(images, imagesBelow(inner)...)
		}
	}

	return images
}

// secretURN is what the name of a key of a Secret starts with, where it stands for its value.
const secretURN = "urn:k8s:secret:"

// showManifests returns the tap's settings in manifests, with the values of Secrets put in.
func showManifests(text string) (map[string]settings, error) {
	manifests, err := documents(text)
	if err != nil {
		return nil, err
	}
	secrets := map[string]string{}
	for _, manifest := range manifests {
		name := fmt.Sprint(at(manifest, "metadata", "name"))
		plain, _ := at(manifest, "stringData").(map[string]any)
		for key, value := range plain {
			secrets[secretURN+name+":"+key] = fmt.Sprint(value)
		}
		encoded, _ := at(manifest, "data").(map[string]any)
		for key, value := range encoded {
			decoded, err := base64.StdEncoding.DecodeString(fmt.Sprint(value))
			if manifest["kind"] == "Secret" && err == nil {
				secrets[secretURN+name+":"+key] = string(decoded)
			}
		}
	}

	shown := map[string]settings{}
	for _, manifest := range manifests {
		if config, ok := at(manifest, "spec", "plugin", alias).(settings); ok {
			namespace, _ := at(manifest, "metadata", "namespace").(string)
			if namespace == "" {
				namespace = metav1.NamespaceDefault
			}
			shown[namespace+"-"+fmt.Sprint(at(manifest, "metadata", "name"))] = withSecrets(config, secrets).(settings)
		}
	}

	return shown, nil
}

func withSecrets(value any, secrets map[string]string) any {
	switch value := value.(type) {
	case map[string]any:
		for name := range value {
			value[name] = withSecrets(value[name], secrets)
		}
	case []any:
		for i := range value {
			value[i] = withSecrets(value[i], secrets)
		}
	case string:
		if strings.HasPrefix(value, secretURN) {
			return secrets[value]
		}
	}

	return value
}
