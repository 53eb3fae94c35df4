"""scikit-learn: pipelines, unions and perceptrons, in fitting and predicting."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tt

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 5)), RNG.integers(0, 3, size=40)


def pipeline():
    union = FeatureUnion([("pca", PCA(2)), ("log", FunctionTransformer(np.tanh))])
    return Pipeline(
        [("scale", StandardScaler()), ("union", union), ("skip", "passthrough"), ("fit", LogisticRegression())]
    )


def test_sites_go_by_the_names_that_scikit_learn_gives():
    """Steps of pipelines and parts of unions have their own names."""
    assert {"scale", "union", "union.pca", "union.log", "fit"} < {site.path for site in tt.sites(pipeline())}


def test_a_pipeline(watch):
    """Every part is seen once, and the prediction is the same to the last bit."""
    model = pipeline().fit(X, Y)
    bare = model.predict_proba(X)
    seen = watch(model, "{scale,union,union.pca,union.log,fit}:{input,output}", ":output")
    assert model.predict_proba(X).tobytes() == bare.tobytes()
    seen.tap.step()
    assert sorted(seen.places) == sorted(
        [f"{p}:{q}" for p in ("scale", "union", "union.pca", "union.log", "fit") for q in ("input", "output")]
        + [":output"]
    )
    expected = tt.summarize(model.named_steps["scale"].transform(X))
    assert seen.of("scale:output")[0]["l2"] == expected.l2


def test_fitting(watch):
    """A call of `fit` is a step, in which the parts transform; the fitted model is the same."""
    bare = pipeline().fit(X, Y)
    model = pipeline()
    seen = watch(model, "scale", "union.pca", "fit")
    model.fit(X, Y)
    model.predict(X)
    seen.tap.close()
    assert [(r.step, str(r.place)) for r in seen.records] == [
        (0, "scale:output"), (0, "union.pca:output"), (1, "scale:output"), (1, "union.pca:output"), (1, "fit:output")
    ]  # fmt: skip
    assert model["fit"].coef_.tobytes() == bare["fit"].coef_.tobytes()


def test_what_scikit_learn_asks_of_its_objects_still_works(watch):
    """Cloning, parameters, text, hasattr for methods that are not there, and `set_params`, while watched."""
    model = pipeline().fit(X, Y)
    texts = repr(model), sorted(model.get_params())
    watch(model)
    assert (repr(model), sorted(model.get_params())) == texts
    assert not hasattr(model, "transform") and hasattr(model, "predict_proba")
    assert clone(model).fit(X, Y).predict(X).tobytes() == model.predict(X).tobytes()
    model.set_params(scale__with_mean=False)


@pytest.mark.parametrize("make", [MLPClassifier, MLPRegressor])
def test_perceptrons(watch, make):
    """The layers inside are seen before and after activation, as the weights compute them."""
    model = make(hidden_layer_sizes=(7, 6), max_iter=3, random_state=0)
    with pytest.warns(match="Maximum iterations"):
        model.fit(X, Y)
    bare = model.predict(X)
    seen = watch(model, "**:{input,output}")
    assert model.predict(X).tobytes() == bare.tobytes()
    seen.tap.step()
    before = X @ model.coefs_[0] + model.intercepts_[0]
    assert seen.of("hidden.0:input")[0]["l2"] == pytest.approx(np.linalg.norm(before))
    hidden = np.maximum(before, 0)
    assert seen.of("hidden.0:output")[0]["l2"] == pytest.approx(np.linalg.norm(hidden))
    after = np.maximum(hidden @ model.coefs_[1] + model.intercepts_[1], 0)
    assert seen.of("hidden.1:output")[0]["l2"] == pytest.approx(np.linalg.norm(after))
    assert len(seen.of("out:output")) == 1


def test_training_a_perceptron(watch):
    """In `partial_fit` every pass is seen, and the weights come out the same."""
    from sklearn.neural_network import _multilayer_perceptron as module

    bare, model = (MLPClassifier((4,), random_state=0) for _ in range(2))
    before = dict(module.ACTIVATIONS)
    bare.partial_fit(X, Y, classes=[0, 1, 2]).partial_fit(X, Y)
    seen = watch(model, "hidden.0", "out:input")
    model.partial_fit(X, Y, classes=[0, 1, 2])
    model.partial_fit(X, Y)
    seen.tap.close()
    assert [(r.step, str(r.place)) for r in seen.records] == [
        (step, place) for step in (0, 1) for place in ("hidden.0:output", "out:input")
    ]
    assert [c.tobytes() for c in model.coefs_] == [c.tobytes() for c in bare.coefs_]
    assert dict(module.ACTIVATIONS) == before and all(module.ACTIVATIONS[k] is v for k, v in before.items())


def test_an_ensemble(watch):
    """Fitted members of an ensemble are sites of their own."""
    model = BaggingRegressor(n_estimators=3, random_state=0).fit(X, Y)
    seen = watch(model, "estimators_.*")
    model.predict(X)
    seen.tap.step()
    assert seen.places == [f"estimators_.{i}:output" for i in range(3)]


def test_a_column_transformer(watch):
    """Fitted, its parts are sites once, by their names; what they were copied from runs no more and is no site."""
    columns = ColumnTransformer([("scale", StandardScaler(), [0, 1]), ("tanh", FunctionTransformer(np.tanh), [2])])
    model = Pipeline([("columns", columns), ("fit", LogisticRegression())])
    assert {"columns.scale", "columns.tanh"} < {site.path for site in tt.sites(model)}
    bare = model.fit(X, Y).predict_proba(X)
    paths = [site.path for site in tt.sites(model) if "output" in site.ports]
    assert len(paths) == len(set(paths))
    seen = watch(model)
    assert model.predict_proba(X).tobytes() == bare.tobytes()
    seen.tap.close()
    places = ["columns.scale:output", "columns.tanh.func:output", "fit:output"]
    assert seen.places == places and seen.tap.counts == {}


def test_a_search(watch):
    """Copies that a search fits are not seen, which is counted; the best one is, when it is watched afterwards."""
    search = GridSearchCV(Pipeline([("scale", StandardScaler()), ("fit", LogisticRegression())]), {"fit__C": [0.1, 1]})
    seen = watch(search)
    search.fit(X, Y)
    seen.tap.close()
    assert seen.records == [] and seen.tap.counts["unseen"] == 2
    after = watch(search)
    search.predict(X)
    after.tap.close()
    assert after.places == ["best_estimator_.scale:output", "best_estimator_.fit:output"] and after.tap.counts == {}


def test_sparse_features(watch):
    """A sparse matrix is recorded by its values."""
    model = Pipeline([("tfidf", TfidfVectorizer()), ("fit", LogisticRegression())])
    words = ["a cat sat", "a dog ran", "the cat ran", "the dog sat"]
    model.fit(words, [0, 1, 0, 1])
    seen = watch(model, "tfidf", "fit")
    model.predict(words)
    seen.tap.step()
    assert seen.of("tfidf:output")[0]["numel"] == model["tfidf"].transform(words).nnz


def test_verify_on_a_pipeline():
    """The proof holds here too."""
    assert tt.verify(pipeline().fit(X, Y), X, repeats=1)


def test_a_nan_among_weights_is_located_though_the_labels_are_finite():
    """A NaN that is made before a layer and lost behind it is named by the layer that was given it."""
    model = MLPClassifier((4, 4), tol=10.0, random_state=0).fit(X, Y)
    model.coefs_[1][0, 0] = np.nan
    found = tt.locate_nonfinite(model, X)
    assert (found.site, found.why) == ("hidden.1", "what it was given, which no layer before it gave")


def test_parameters_of_a_perceptron_are_its_weights():
    """What it keeps of its fitting, such as the optimizer's averages, is no parameter, and no rule judges it."""
    model = MLPClassifier((4,), tol=10.0, random_state=0).fit(X, Y)
    assert [s.path for s in tt.sites(model) if "param" in s.ports] == [
        "coefs_.0", "coefs_.1", "intercepts_.0", "intercepts_.1"
    ]  # fmt: skip
