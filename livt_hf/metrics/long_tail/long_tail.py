"""The metrics of livt_hf as a module of the `evaluate` library: loads offline by the path of this folder."""

import datasets
import evaluate
import numpy

from livt_hf.metrics import long_tail_metrics

_DESCRIPTION = """
Accuracy over all images and over many-, medium- and few-shot classes (more than 100, 20 to 100 and fewer than 20
training images), top-5, mean and worst per-class accuracy, macro precision and F1, and calibration (ECE and MCE) of a
classifier of long-tailed data. A group's accuracy is the mean of the accuracies of its classes that have test images.
"""

_INPUTS = """
Args:
    predictions: logits, one row of C numbers per image (probabilities with confidence="given"), or class ids.
    references: class ids.
    class_counts: training images of each of the C classes, in the order of the logits.
    many_above, few_below: thresholds of the shot groups (100 and 20).
    bins: calibration bins (15).
    confidence: "softmax" (default) or "sigmoid" of the logits, or "given".
Returns:
    fractions accuracy, top5, many, medium, few, mean_class_accuracy, worst_class_accuracy, macro_precision, macro_f1
    (also of each group), ece, mce, mean_confidence (None for what has no image or class, or no logits), and
    num_images, num_nan.
Examples:
    >>> long_tail = evaluate.load("long_tail")
    >>> results = long_tail.compute(predictions=[[2., 0.], [0., 1.]], references=[0, 0], class_counts=[500, 5])
    >>> results["accuracy"], results["many"], results["few"]
    (0.5, 0.5, None)
"""

_CITATION = """
@inproceedings{LiVT,
  title = {Learning Imbalanced Data with Vision Transformers},
  author = {Xu, Zhengzhuo and Liu, Ruikang and Yang, Shuo and Chai, Zenghao and Yuan, Chun},
  booktitle = {CVPR},
  year = {2023}
}
"""


class LongTail(evaluate.Metric):
    def _info(self):
        labels = datasets.Value("int64")
        logits = datasets.Sequence(datasets.Value("float32"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=[
                datasets.Features({"predictions": predictions, "references": labels})
                for predictions in (logits, labels)
            ],
        )

    def _compute(self, predictions, references, class_counts, **settings):
        # evaluate hands rows back as lists of Python floats: some 36 bytes per logit while this runs.
        predictions = numpy.asarray(predictions)
        if predictions.ndim == 2:
            predictions = predictions.astype("float32")
        return long_tail_metrics(predictions, references, class_counts, **settings)
