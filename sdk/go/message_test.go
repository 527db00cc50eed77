package torpor

import "testing"

func TestFieldsComeBackInOrderAndMissingOnesAreEmpty(t *testing.T) {
	f := fields(encode([]byte("a"), nil, []byte("bc")))
	for _, want := range []string{"a", "", "bc", ""} {
		if got := f.text(); got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
}

func TestAFieldThatIsCutOffIsEmpty(t *testing.T) {
	for _, message := range [][]byte{{9, 0, 0, 0, 'a'}, {9, 0}, {255, 255, 255, 255}} {
		f := fields(message)
		if got := f.text(); got != "" {
			t.Fatalf("got %q of %v", got, message)
		}
	}
}
