"""Networks of many kinds, each with example input, and random numbers in constant initialisations."""

import copy

import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F


class LeNet(nn.Module):
    """As in FedMA's program: no non-linearity after the first linear layer."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, inputs):
        features = F.relu(F.max_pool2d(self.conv1(inputs), 2))
        features = F.relu(F.max_pool2d(self.conv2(features), 2))
        return self.fc2(self.fc1(features.flatten(1)))


class HardLeNet(LeNet):
    """With a hard-coded number of features."""

    def forward(self, inputs):
        features = F.relu(F.max_pool2d(self.conv1(inputs), 2))
        features = F.relu(F.max_pool2d(self.conv2(features), 2))
        return self.fc2(self.fc1(features.view(-1, 800)))


class Residual(nn.Module):
    """A stem and two blocks with shared channels in one group, and one group inside each block."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 3, padding=1), norm(8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, inputs):
        features = F.relu(self.norm(self.stem(inputs)))
        for block in self.blocks:
            features = F.relu(features + block(features))
        return self.head(features.mean((2, 3)))


def vgg9():
    layers, channels = [], 3
    for index, width in enumerate([32, 64, 128, 128, 256, 256]):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if index % 2 else []
        layers += [nn.Dropout2d(0.05)] if index == 3 else []
        channels = width
    head = [nn.Dropout(0.1), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


class Characters(nn.Module):
    """A character language model: predicts from the last step."""

    def __init__(self, layer=nn.LSTM, hidden=256, layers=1, bidirectional=False, **options):
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.rnn = layer(8, hidden, layers, batch_first=True, bidirectional=bidirectional, **options)
        size = options.get("proj_size", hidden) * (2 if bidirectional else 1)
        self.decoder = nn.Linear(size, 80)

    def forward(self, tokens):
        return self.decoder(self.rnn(self.embedding(tokens))[0][:, -1])


class Steps(nn.Module):
    """The same model, step by step."""

    def __init__(self):
        super().__init__()
        self.embedding, self.cell, self.decoder = nn.Embedding(80, 8), nn.LSTMCell(8, 64), nn.Linear(64, 80)

    def forward(self, tokens):
        inputs = self.embedding(tokens)
        hidden = state = inputs.new_zeros(len(tokens), 64)
        for step in range(tokens.shape[1]):
            hidden, state = self.cell(inputs[:, step], (hidden, state))
        return self.decoder(hidden)


class Tied(nn.Module):
    """A language model with the embedding as output layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.mix = nn.Embedding(20, 6), nn.GRU(6, 9, 2, batch_first=True), nn.Linear(9, 6)
        self.output = nn.Linear(6, 20)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(torch.tanh(self.mix(self.rnn(self.embedding(tokens))[0])))


class PaddedShortcut(nn.Module):
    """A residual block with a zero-padded shortcut (option A of the ResNets for CIFAR)."""

    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv1, self.norm1 = nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32, 10)

    def forward(self, inputs):
        features = F.relu(self.stem_norm(self.stem(inputs)))
        hidden = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(features)))))
        return self.fc(F.relu(hidden + F.pad(features[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8))).mean((2, 3)))


class Mixed(nn.Module):
    """Rare layers: transposed and 1d convolutions, instance normalisation, PReLU, two outputs per channel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.PReLU(6))
        self.depthwise = nn.Conv2d(6, 12, 3, groups=6)
        self.up = nn.ConvTranspose2d(12, 8, 2, 2)
        self.depthwise_up = nn.ConvTranspose2d(8, 8, 2, 2, groups=8)
        self.shuffle = nn.PixelShuffle(2)
        self.series = nn.Sequential(nn.Conv1d(2, 10, 3), nn.ReLU(), nn.Conv1d(10, 6, 3, groups=2), nn.ReLU())
        self.head = nn.Conv1d(6, 2, 1)

    def forward(self, inputs):
        features = self.shuffle(self.depthwise_up(self.up(self.depthwise(self.conv(inputs)))).relu())
        return self.head(self.series(features.mean(2)))


def group_norm(groups):
    return lambda channels: nn.GroupNorm(min(groups, channels), channels)


def resnet18(**options):
    return torchvision.models.resnet18(num_classes=10, **options)


def small_resnext():
    block = torchvision.models.resnet.Bottleneck
    return torchvision.models.ResNet(block, [1, 1, 1, 1], 10, groups=4, width_per_group=8)


def small_vit():
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)


def segmenter(kind, encoder="resnet18", **options):
    return getattr(smp, kind)(encoder, encoder_weights=None, classes=4, **options)


def images(size=64, channels=3):
    return torch.randn(2, channels, size, size)


def tokens(length=12, count=80):
    return torch.randint(0, count, (2, length))


def randomised(module, seed=0):
    """Randomises constant initial values, which would hide permutations."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            if name.endswith("running_var"):
                value.copy_(0.5 + torch.rand(value.shape, generator=generator))
            elif value.is_floating_point() and (value.numel() < 2 or value.std() < 1e-3):
                value.add_(0.2 * torch.randn(value.shape, generator=generator))
    return module


def build(make):
    torch.manual_seed(0)
    module, example = make()
    return randomised(module).eval(), example


def outputs(module, example, dtype=torch.float64):
    module = copy.deepcopy(module).to(dtype).eval()
    with torch.no_grad():
        return compute(module, example.to(dtype) if example.is_floating_point() else example)


def compute(module, example):
    result = module(example)
    return result["out"] if isinstance(result, dict) else result


# name: (network and example), groups, neurons, growable groups, an entry with outputs on the first axis
QUICK = {
    "LeNet": (lambda: (LeNet(), images(28, 1)), 3, 570, 3, "fc2.bias"),
    "VGG-9": (lambda: (vgg9(), images(32)), 8, 1888, 8, "21.bias"),
    "LSTM": (lambda: (Characters(), tokens()), 2, 264, 2, "decoder.bias"),
    "LSTM, 2 layers": (lambda: (Characters(hidden=64, layers=2), tokens()), 3, 136, 1, "decoder.bias"),
    "LSTM, both ways": (lambda: (Characters(hidden=64, bidirectional=True), tokens()), 3, 136, 1, "decoder.bias"),
    "LSTM, projected": (lambda: (Characters(hidden=9, proj_size=5), tokens()), 3, 22, 3, "decoder.bias"),
    "LSTM, step by step": (lambda: (Steps(), tokens(6)), 2, 72, 1, "decoder.bias"),
    "GRU": (lambda: (Characters(nn.GRU, 32), tokens()), 2, 40, 2, "decoder.bias"),
    "RNN": (lambda: (Characters(nn.RNN, 32), tokens()), 2, 40, 2, "decoder.bias"),
    "tied": (lambda: (Tied(), tokens(7, 20)), 3, 24, 1, "output.bias"),
    "mixed": (lambda: (Mixed(), images(12)), 5, 19, 3, "head.bias"),
    "padded shortcut": (lambda: (PaddedShortcut(), images(32)), 3, 64, 2, "fc.bias"),
    "ViT": (lambda: (small_vit(), images(32)), 19, 576, 2, "heads.head.bias"),
    "ResNet-18": (lambda: (resnet18(), images(32)), 12, 2880, 12, "fc.bias"),
    "ResNet-18, GroupNorm": (lambda: (resnet18(norm_layer=group_norm(32)), images(32)), 12, 2880, 0, "fc.bias"),
    "ResNet-18, timm": (lambda: (timm.create_model("resnet18", num_classes=10), images(32)), 12, 2880, 12, "fc.bias"),
    "ResNeXt, small": (lambda: (small_resnext(), images(32)), 25, 4504, 9, "fc.bias"),
    "MobileNetV2": (
        lambda: (torchvision.models.mobilenet_v2(num_classes=10), images(32)), 25, 8000, 25, "classifier.1.bias",
    ),
    "Unet": (
        lambda: (segmenter("Unet", decoder_attention_type="scse"), images(32)),
        30, 3994, 30, "segmentation_head.0.bias",
    ),
    "FPN": (lambda: (segmenter("FPN"), images(32)), 17, 3648, 13, "segmentation_head.0.bias"),
    "DeepLabV3Plus": (lambda: (segmenter("DeepLabV3Plus"), images(32)), 21, 4976, 21, "segmentation_head.0.bias"),
}  # fmt: skip

SLOW = {
    "ResNet-18, GroupNorm(2)": (lambda: (resnet18(norm_layer=group_norm(2)), images()), 12, 2880, 0, "fc.bias"),
    "ResNet-18, GroupNorm(1)": (lambda: (resnet18(norm_layer=group_norm(1)), images()), 12, 2880, 0, "fc.bias"),
    "ResNet-50": (lambda: (torchvision.models.resnet50(num_classes=10), images()), 37, 11456, 37, "fc.bias"),
    "ResNet-50, GroupNorm": (
        lambda: (torchvision.models.resnet50(num_classes=10, norm_layer=group_norm(32)), images()),
        37, 11456, 0, "fc.bias",
    ),
    "ResNeXt-50": (lambda: (torchvision.models.resnext50_32x4d(num_classes=10), images()), 533, 11692, 21, "fc.bias"),
    "MobileNetV3": (
        lambda: (torchvision.models.mobilenet_v3_large(num_classes=10), images()), 30, 8696, 30, "classifier.3.bias",
    ),
    "EfficientNet-B0": (
        lambda: (torchvision.models.efficientnet_b0(num_classes=10), images()), 40, 11404, 40, "classifier.1.bias",
    ),
    "DenseNet-121": (
        lambda: (torchvision.models.densenet121(num_classes=10), images()), 120, 10240, 120, "classifier.bias",
    ),
    "ShuffleNetV2": (
        lambda: (torchvision.models.shufflenet_v2_x1_0(num_classes=10), images()), 86, 5626, 18, "fc.bias",
    ),
    "ConvNeXt": (
        lambda: (torchvision.models.convnext_tiny(num_classes=10), images()), 22, 27936, 18, "classifier.2.bias",
    ),
    "UnetPlusPlus": (lambda: (segmenter("UnetPlusPlus"), images()), 34, 4768, 34, "segmentation_head.0.bias"),
    "DeepLabV3": (lambda: (segmenter("DeepLabV3"), images()), 19, 4672, 19, "segmentation_head.0.bias"),
    "DeepLabV3Plus, ResNet-50": (
        lambda: (segmenter("DeepLabV3Plus", "resnet50"), images()), 46, 13552, 46, "segmentation_head.0.bias",
    ),
    "DeepLabV3Plus, MobileNetV2": (
        lambda: (segmenter("DeepLabV3Plus", "mobilenet_v2"), images()), 34, 11224, 34, "segmentation_head.0.bias",
    ),
    "DeepLabV3Plus, EfficientNet": (
        lambda: (segmenter("DeepLabV3Plus", "efficientnet-b0"), images()), 48, 12220, 48, "segmentation_head.0.bias",
    ),
    "PSPNet": (lambda: (segmenter("PSPNet"), images()), 11, 1216, 11, "segmentation_head.0.bias"),
    "Segformer": (lambda: (segmenter("Segformer", "mit_b0"), images()), 87, 8448, 13, "segmentation_head.0.bias"),
    "DeepLabV3, torchvision": (
        lambda: (
            torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=4),
            images(),
        ), 44, 13248, 44, "classifier.4.bias",
    ),
}  # fmt: skip
