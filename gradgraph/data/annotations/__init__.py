"""Images with boxes, masks and polygons, in the formats of COCO, YOLO and Pascal VOC."""
