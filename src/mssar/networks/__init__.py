"""The networks of the paper, each with no recalibration, SE, MS-SAR or any other."""

from mssar.networks.cifar_resnet import CifarResNet
from mssar.networks.classifier import Classifier
from mssar.networks.densenet import DenseNet
from mssar.networks.registry import create_model, list_models
from mssar.networks.resnet import BasicBlock, Bottleneck, GroupedBottleneck, ResNet
from mssar.networks.sharing import from_pretrained

__all__ = [
    "BasicBlock",
    "Bottleneck",
    "CifarResNet",
    "Classifier",
    "DenseNet",
    "GroupedBottleneck",
    "ResNet",
    "create_model",
    "from_pretrained",
    "list_models",
]
